"""Formats of a trained model for use outside of trainkit, one file per format."""
