"""Datasets that are shipped with trainkit."""
