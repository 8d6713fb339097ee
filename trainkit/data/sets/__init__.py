"""Datasets that trainkit knows by name."""
