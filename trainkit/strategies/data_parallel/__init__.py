"""Data parallelism: a copy of the model on every device, whose gradients are summed each step."""

from trainkit.strategies.data_parallel.strategy import Mirrored, MultiWorkerMirrored

__all__ = ["Mirrored", "MultiWorkerMirrored"]
