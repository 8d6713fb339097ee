"""Composition, checks, the schema of the run, and objects from `_target_`."""
