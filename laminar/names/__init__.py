"""Names of things, roles, exit codes and places; what pure code may ask of the world (ports)."""
