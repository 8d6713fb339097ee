"""Representations of tensors in strategies: flat, sharded, or read lazily."""
