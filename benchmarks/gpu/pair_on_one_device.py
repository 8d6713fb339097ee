"""Several ranks on one device: NCCL refuses it, and gloo exchanges tensors of a GPU through the memory of the host."""

from __future__ import annotations

from dataclasses import dataclass

from trainkit.errors import Problem
from trainkit.strategies.base import PlanContext
from trainkit.strategies.data_parallel.strategy import Mirrored
from trainkit.strategies.groups.process_group import ProcessGroup
from trainkit.strategies.mesh.strategy import Mesh


@dataclass(frozen=True, kw_only=True)
class OnOneDevice(ProcessGroup):
    """Ranks on the first device: to try an exchange where there is one GPU."""

    def backend(self, device_type: str, *, exchanges_on_cpu: bool = False) -> str:
        """Return gloo."""
        return "gloo"

    def _devices(self, context: PlanContext, indices: range) -> list[str]:
        return ["cuda:0" if context.num_gpus else "cpu" for _ in indices]

    def _host_problems(self, context: PlanContext) -> list[Problem]:
        return []


@dataclass(frozen=True, kw_only=True)
class PairOnOneDevice(OnOneDevice, Mirrored):
    """Mirrored, with every replica on the first device."""


@dataclass(frozen=True, kw_only=True)
class MeshOnOneDevice(OnOneDevice, Mesh):
    """Mesh, with every rank on the first device."""
