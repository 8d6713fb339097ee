"""Whether a run fits into the memory of its devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from trainkit.run.estimates.hardware import Hardware
from trainkit.run.estimates.memory import DeviceMemory
from trainkit.run.planning.plan import RunPlan
from trainkit.storage import num_bytes

PROCESS_BYTES: Final = 320 * 2**20
"""Bytes of a process of trainkit without tensors, on the host. Source: benchmarks/results/memory.md, 2026-11."""
CONTEXT_BYTES: Final = 768 * 2**20
"""Bytes that a process takes of a GPU before its first tensor: the CUDA context and kernels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """The memory of this host that processes may take now."""

    memory_bytes: int
    """Number of bytes."""
    name: str = "this machine"
    """Name for the user."""
    whole_host: bool = True
    """Whether all tasks of a host share it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether the run fits into the memory of the device with the largest use.

    Example:
        >>> Verdict(needs=3 * 2**30, has=2 * 2**30, name="laptop", is_complete=True).fits
        False
    """

    needs: int
    """Bytes at the peak of a step or an evaluation, of all processes that share the memory."""
    has: int
    """Bytes of memory."""
    name: str
    """The device, for the user."""
    is_complete: bool
    """Whether `needs` contains the activations."""

    @property
    def fits(self) -> bool | None:
        """Whether there is enough memory; None if there is for the rest, and the activations are unknown."""
        if self.needs > self.has:
            return False
        return True if self.is_complete else None

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the line of `trainkit plan`: label, text."""
        words = {True: "yes", False: "no", None: "unknown, because the activations are unknown"}
        more = "" if self.is_complete else " and activations"
        yield "fits", f"{words[self.fits]}: needs {num_bytes(self.needs)}{more}, {self.name} has {num_bytes(self.has)}"


def verdict_of(plan: RunPlan, memory: DeviceMemory, hardware: Hardware | HostMemory) -> Verdict:
    """Return whether a run fits.

    The memory of a host is shared by all tasks on it, and that of a device by the tasks on that device.
    """
    apiece = memory.most if hardware.whole_host else memory.peak or memory.held.total_bytes
    apiece += PROCESS_BYTES if hardware.whole_host else CONTEXT_BYTES
    sharers = _sharers(plan, hardware)
    return Verdict(
        needs=apiece * sharers - _unstaged(plan, memory, hardware, sharers),
        has=hardware.memory_bytes,
        name=hardware.name,
        is_complete=memory.peak is not None,
    )


def _unstaged(plan: RunPlan, memory: DeviceMemory, hardware: Hardware | HostMemory, sharers: int) -> int:
    """Return the bytes of copies that tasks do not have: only one task has the copy if each holds the whole state."""
    is_sharded = plan.components.strategy.facts_in(plan.context).is_sharded
    counted = hardware.whole_host and memory.held.staged_here and not is_sharded
    return memory.held.staging_bytes * (sharers - 1) if counted else 0


def _sharers(plan: RunPlan, hardware: Hardware | HostMemory) -> int:
    """Return the largest number of tasks that share a memory."""
    launch = plan.context.launch
    if hardware.whole_host:
        return -(-len(plan.tasks) // (1 if launch is None else launch.num_hosts))
    if launch is not None:
        return 1
    counts = Counter(task.device for task in plan.tasks if task.device != "cpu")
    return max(counts.values(), default=1)
