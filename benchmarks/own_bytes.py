"""A callback that writes the private memory of each rank, for `plan_limits.py`."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainkit.strategies.base import StepOutcome
from trainkit.trainer.events import Callback, Run


def own_bytes() -> int:
    """Return the private memory of this process that counts towards RLIMIT_DATA."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    return int(line.split()[1]) * 1024


def tensor_bytes(model: nn.Module) -> int:
    """Return the bytes of the tensors of this process that Python knows, each memory once."""
    alive = [*(item for item in gc.get_objects() if isinstance(item, Tensor)), *model.parameters(), *model.buffers()]
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in alive]
    storages = [leaf.untyped_storage() for leaf in local if leaf.device.type == "cpu" and leaf.layout is torch.strided]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@dataclass(frozen=True, kw_only=True)
class OwnBytes(Callback):
    """Writes `own-PID` into the run folder: the most private memory after a step and at the end, without tensors."""

    observes: ClassVar[bool] = True

    _bytes: list[int] = field(default_factory=list, init=False, repr=False, compare=False)

    def step_end(self, run: Run, outcome: StepOutcome) -> None:
        """Record the memory after a step."""
        self._record(run)

    def train_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """Write the most of all steps, and of this moment."""
        self._record(run)
        (run.folder / f"own-{os.getpid()}").write_text(str(max(self._bytes)))

    def _record(self, run: Run) -> None:
        self._bytes.append(own_bytes() - tensor_bytes(run.model))
