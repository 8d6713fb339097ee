"""Single layers cut over the ranks of a replica."""

from trainkit.strategies.tensor_parallel.strategy import TensorParallel

__all__ = ["TensorParallel"]
