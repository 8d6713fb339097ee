"""Tensor parallelism: single layers are sharded over the ranks of a replica."""
