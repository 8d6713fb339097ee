"""One device, in the process that asks: no group, no exchange, no overhead for what is not used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from trainkit.cluster.tasks import Task
from trainkit.errors import Problem
from trainkit.fields import placement
from trainkit.strategies.base import PlanContext
from trainkit.strategies.groups.devices import device_problems, parse_device
from trainkit.strategies.groups.single_process import SingleProcess
from trainkit.strategies.model_transforms import Compiles

__all__ = ["OneDevice"]


@dataclass(frozen=True, kw_only=True)
class OneDevice(SingleProcess):
    """Train on one device.

    Example:
        >>> OneDevice(device="cpu").tasks(PlanContext())
        (Task(role='worker', index=0, rank=0, device='cpu'),)
    """

    named: ClassVar[str] = "one_device"
    compiles: ClassVar[Compiles] = "model"

    device: Annotated[str, placement] = "auto"
    """`auto` (the first GPU, else the CPU), `cpu`, `cuda:1`, `/gpu:1`."""

    def problems(self, facts: PlanContext) -> list[Problem]:
        """Whether the device exists, and whether there is anything for further processes to do."""
        if found := self.launch_problems(facts):
            return found
        if self.device == "auto":
            return []
        return device_problems("strategy.device", self.device, facts.num_gpus)

    def proof_problems(self, facts: PlanContext) -> list[Problem]:  # noqa: ARG002 - the same on any host
        """Return that it is the reference itself; a subclass may compute in another way."""
        if type(self) is not OneDevice:
            return []
        rule = "is the reference of every proof, and it shows nothing to compare it with itself. Use another strategy."
        return [Problem(key="strategy", value=self.named, rule=rule)]

    def tasks(self, facts: PlanContext) -> tuple[Task, ...]:
        """One task on the device."""
        fallback = "cuda:0" if facts.num_gpus else "cpu"
        device = fallback if self.device == "auto" else parse_device(self.device)
        return (Task(role="worker", index=0, rank=0, device=device or fallback),)
