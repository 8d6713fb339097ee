"""Tensors as strategies hold and hand them over: flat, sharded, or read when they are needed."""
