"""Multi-worker mirrored: synchronous data parallelism over the processes of a launch, on one host or many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trainkit.strategies.data_parallel.base import DataParallel

__all__ = ["MultiWorkerMirrored"]


@dataclass(frozen=True, kw_only=True)
class MultiWorkerMirrored(DataParallel):
    """Train a copy of the model on every device of every host, in step: mirrored, over machines.

    It joins the processes that torchrun, SLURM, MPI, TF_CONFIG or a cluster spec started. Where nothing started it, it
    takes the devices of this host.

    Example:
        >>> from trainkit.strategies.base import PlanContext
        >>> [task.device for task in MultiWorkerMirrored(replicas=2).tasks(PlanContext())]
        ['cpu', 'cpu']

    Source: tf.distribute.MultiWorkerMirroredStrategy.
    """

    alone_as_one_device: ClassVar[bool] = True
