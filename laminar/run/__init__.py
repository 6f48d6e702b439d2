"""A run and its directory: files, lock, and the ways to end or kill the processes of a run."""
