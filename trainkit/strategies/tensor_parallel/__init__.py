"""Tensor parallelism: single layers are sharded over the ranks of a replica."""

from trainkit.strategies.tensor_parallel.strategy import TensorParallel

__all__ = ["TensorParallel"]
