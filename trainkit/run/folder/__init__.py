"""The run folder: its files, its lock, its fencing token and its records."""
