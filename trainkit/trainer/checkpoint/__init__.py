"""Checkpoints: atomic, hashed, verified before use, never pickled."""
