"""Choose the reducer of gradients by the options of the user; with `auto`, by a rule."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

import torch
import torch.distributed as dist

from trainkit.cluster.host import host_id
from trainkit.cluster.tasks import Task
from trainkit.errors import Problem
from trainkit.fields import at_least, maths, placement, speed, unit
from trainkit.objectives.base import Collective
from trainkit.strategies.base import PlanContext
from trainkit.strategies.reducers.shared_memory import SharedMemoryReducer, shared_memory_obstacle
from trainkit.strategies.reducers.vector import (
    BackendReducer,
    Compression,
    Compressor,
    HierarchicalReducer,
    Reducer,
    ReduceThenBroadcastReducer,
    RingReducer,
)

Reducing = Literal["backend", "shared_memory", "ring", "hierarchical", "to_one_device"]
"""The reducers that sum gradients over the ranks."""
Reduce = Literal[Reducing, "auto"]
"""A reducer, or `auto`: one by a rule."""


@dataclass(frozen=True, kw_only=True)
class ReductionOptions:
    """The options of summing gradients over ranks."""

    reduce: Annotated[Reduce, placement] = "auto"
    """The reducer of gradients; auto: shared_memory for CPU processes of one host, else backend."""
    bucket_mb: Annotated[float, at_least(0), speed, unit("MiB")] = 25.0
    """MiB of gradients that the backend exchanges at once while backward computes the others; 0: all at the end."""
    compression: Annotated[Compression, maths(neutral="none")] = "none"
    """Send gradients as bfloat16 or float16, or each as two thin matrices (powersgd): fewer bytes, and a different
    result.
    """
    powersgd_rank: Annotated[int, at_least(1), maths(neutral=1)] = 1
    """Width of PowerSGD's matrices: a larger width is more exact and sends more bytes."""
    powersgd_after: Annotated[int, at_least(2), maths(neutral=1000), unit("steps")] = 1000
    """Steps whose gradients PowerSGD sends uncompressed, before it begins."""
    allow_unused: Annotated[bool, placement] = False
    """Whether parameters may get no gradient; they are then excluded from the exchange. False: an error names them."""

    def reduction_problems(self, context: PlanContext, tasks: Callable[[], Sequence[Task]]) -> list[Problem]:
        """Return problems of combined reducers, compression and modes; pure."""
        by_backend = self.reduce in ("backend", "auto")
        if context.numerics.reproducible:
            rule = "does not work with numerics.reproducible=true, whose order of summation is fixed. Leave one out."
            return self._where((not by_backend, "reduce", rule), (self.compression != "none", "compression", rule))
        hosts, defaults = context.launch.num_hosts if context.launch is not None else 1, ReductionOptions
        shares, thin = self.reduce == "shared_memory", self.compression == "powersgd"
        no_effect = "has no effect without strategy.compression=powersgd."
        reason = "what one such step loses would stay in its error feedback for good. Use bf16 or none."
        on_gpus = shares and hosts == 1 and any(task.device != "cpu" for task in tasks())
        return self._where(
            (shares and hosts > 1, "reduce",
             f"reaches the processes of one host, and there are {hosts}. Use backend, hierarchical or auto."),
            (on_gpus, "reduce", "sums in the memory of the host, and the replicas are on GPUs. Use backend."),
            (shares and hosts == 1 and not on_gpus and not sys.platform.startswith("linux"), "reduce",
             f"needs Linux, and this is {sys.platform}. Use backend."),
            (not by_backend and self.bucket_mb != defaults.bucket_mb, "bucket_mb",
             f"has no effect with strategy.reduce={self.reduce}: only backend sends buckets."),
            (not by_backend and self.compression != "none", "compression",
             f"is done by the backend, and strategy.reduce={self.reduce}. Use strategy.reduce=backend."),
            (not thin and self.powersgd_rank != defaults.powersgd_rank, "powersgd_rank", no_effect),
            (not thin and self.powersgd_after != defaults.powersgd_after, "powersgd_after", no_effect),
            (thin and context.precision == "fp16_mixed", "compression",
             f"cannot leave out a step that overflows, as precision=fp16_mixed does: {reason}"),
            (thin and context.numerics.leaves_out, "compression",
             f"cannot leave out a step, as numerics.on_nonfinite={context.numerics.on_nonfinite} does: {reason}"),
            (thin and bool(context.optimizers), "compression",
             "supports one exchange per step, and with optimizers there may be several."),
        )  # fmt: skip

    def _where(self, *rows: tuple[bool, str, str]) -> list[Problem]:
        """Return a problem for each row (whether it holds, option, rule) that holds."""
        return [
            Problem(key=f"strategy.{key}", value=getattr(self, key), rule=rule) for holds, key, rule in rows if holds
        ]

    @property
    def bucket_bytes(self) -> int:
        """Gradients of this many bytes are copied into the vector of the exchange together; 0: all after backward."""
        return int(self.bucket_mb * 2**20) if self.compression != "powersgd" else 0

    def rule(self, *, num_ranks: int, num_hosts: int, on_gpus: bool) -> tuple[Reduce, str]:
        """Return the reducer of these ranks, and for auto the reason.

        With auto: shared memory between CPU processes of one host, on Linux; else `backend`, which on GPUs exchanges
        while backward computes, and which alone has buckets and compression.

        Example:
            >>> ReductionOptions().rule(num_ranks=2, num_hosts=1, on_gpus=True)
            ('backend', 'GPUs')
        """
        if self.reduce != "auto":
            return self.reduce, ""
        reasons = {
            "GPUs": on_gpus,
            "one replica": num_ranks == 1,
            "several hosts": num_hosts > 1,
            "compression": self.compression != "none",
            "bucket_mb": self.bucket_mb != ReductionOptions.bucket_mb,
            f"{sys.platform}, not Linux": not sys.platform.startswith("linux"),
        }
        because = next((reason for reason, holds in reasons.items() if holds), None)
        return ("shared_memory", "CPU processes of one host") if because is None else ("backend", because)

    def planned_reducer(self, context: PlanContext, tasks: Sequence[Task]) -> tuple[Reduce, str]:
        """Return the reducer of a planned run, and for auto the reason; pure."""
        return self.rule(
            num_ranks=len(tasks),
            num_hosts=1 if context.launch is None else context.launch.num_hosts,
            on_gpus=any(task.device != "cpu" for task in tasks),
        )

    def exchange_copies(self, reducer: Reduce, num_ranks: int) -> tuple[float, float]:
        """Return the copies of all gradients that a reducer needs in addition to its vector, and how many of them
        outlive a step; pure.
        """
        # ring: a slice that receives; shared_memory: a part of the total, which is mapped until the end.
        beside = 1 / num_ranks if reducer in ("ring", "shared_memory") else 0
        kept_copies = beside if reducer == "shared_memory" else 0
        # Two bytes instead of four; PowerSGD: the error, which is kept, and the gradients to compare with.
        compressed = {"none": 0, "bf16": 1, "fp16": 1, "powersgd": 2}
        return beside + compressed[self.compression], kept_copies + (self.compression == "powersgd")

    def reducer_of(
        self,
        collective: Collective,
        *,
        timeout_s: float,
        on_gpus: bool,
        all_ranks: Collective | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> Callable[[], Reducer]:
        """Return a function that makes the reducer of some ranks; both are collective over all ranks of the run.

        Args:
            collective: gathers small tensors over the ranks that sum.
            timeout_s: seconds to wait for another rank.
            on_gpus: whether any gradient is on a GPU.
            all_ranks: gathers small tensors over all ranks of the run; None: they are the same.
            group: the ranks that sum; None: all ranks of the run.
        """
        every = all_ranks or collective
        together = 0 if group is None else dist.get_process_group_ranks(group)[0]
        rows = torch.cat(every.gather(torch.tensor([[together, host_id()]]))).tolist()
        places = [(first, host) for first, host in rows]
        hosts = {host for first, host in places if first == together}
        makers: dict[Reduce, Callable[[], Reducer]] = {
            "backend": lambda: self._backend(group),
            "shared_memory": lambda: SharedMemoryReducer(collective, timeout_s=timeout_s, group=group),
            "ring": lambda: RingReducer(collective, group),
            "hierarchical": lambda: HierarchicalReducer(places, rank=every.rank, timeout_s=timeout_s),
            "to_one_device": lambda: ReduceThenBroadcastReducer(group),
        }
        return makers[self.rule(num_ranks=collective.num_ranks, num_hosts=len(hosts), on_gpus=on_gpus)[0]]

    def without_obstacle(self, collective: Collective, *, on_gpus: bool, num_bytes: int) -> tuple[Self, str | None]:
        """Return the options with `backend` in the place of an `auto` whose rule the ranks cannot use, and why;
        collective.

        Args:
            collective: gathers small tensors over the ranks.
            on_gpus: whether any gradient is on a GPU.
            num_bytes: bytes of all gradients.
        """
        hosts = set(torch.cat(collective.gather(torch.tensor([host_id()]))).tolist())
        reducer, _ = self.rule(num_ranks=collective.num_ranks, num_hosts=len(hosts), on_gpus=on_gpus)
        if self.reduce != "auto" or reducer != "shared_memory":
            return self, None
        why = shared_memory_obstacle(collective, num_bytes)
        if why is None:
            return self, None
        return replace(self, reduce="backend"), f"strategy.reduce=auto: backend, because {why}."

    def described(self, context: PlanContext, tasks: Sequence[Task]) -> str:
        """Return the reducer and the compression, for the summary of a run."""
        reducer, because = self.planned_reducer(context, tasks)
        return f"{reducer}{f' (auto: {because})' if because else ''}, compression {self.compression}"

    def _backend(self, group: dist.ProcessGroup | None) -> BackendReducer:
        compressor = None
        if self.compression != "none":
            compressor = Compressor(
                self.compression, powersgd_rank=self.powersgd_rank, powersgd_after=self.powersgd_after, group=group
            )
        return BackendReducer(bucket_bytes=self.bucket_bytes, compressor=compressor, group=group)
