"""One file per launcher: how its environment variables describe the group that it started."""
