"""The callbacks of a run, one file each."""
