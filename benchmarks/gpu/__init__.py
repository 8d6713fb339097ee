"""Measurements and checks on a machine with a GPU."""
