"""One run, one directory: its files, its lock, and what ends or kills the processes of a run."""
