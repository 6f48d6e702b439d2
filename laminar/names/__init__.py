"""Ids, roles, exit codes and ports, through which pure code reaches the outside world."""
