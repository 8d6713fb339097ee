"""Data parallelism: a copy of the model on every device, whose gradients are summed each step."""

from trainkit.strategies.data_parallel.mirrored import Mirrored
from trainkit.strategies.data_parallel.multi_worker_mirrored import MultiWorkerMirrored

__all__ = ["Mirrored", "MultiWorkerMirrored"]
