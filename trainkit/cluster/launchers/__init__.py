"""One file a launcher: what its environment variables say of the group that it started."""
