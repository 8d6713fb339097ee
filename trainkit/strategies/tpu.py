"""TPUs and other XLA devices: one process, whose samples XLA distributes over all devices (SPMD)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from trainkit.cluster.tasks import Task
from trainkit.errors import Problem, first_line
from trainkit.fields import placement
from trainkit.numerics.batch import Ticket
from trainkit.numerics.generators import key32
from trainkit.objectives.base import Loss
from trainkit.strategies.base import Batch, Facts, PlanContext, SetupRequest, StepContext, StepOutcome
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.core.step import ShardStep
from trainkit.strategies.core.synchronous import OneProcess, SynchronousExecutor, build_parts
from trainkit.strategies.tensors.layouts import SingleDevicePlacement

_VERSION: Final = "2.9.0"
"""The supported version of torch_xla, which requires torch of the same version."""


@dataclass(frozen=True, kw_only=True)
class Tpu(OneProcess):
    """Train one replica on XLA devices.

    A step is traced and compiled by XLA, once for every shape of a shard: a short last batch costs one compilation.

    Example:
        >>> Tpu().tasks(PlanContext())
        (Task(role='worker', index=0, rank=0, device='xla:0'),)
    """

    facts: ClassVar[Facts] = Facts(compiles="nothing")

    spmd: Annotated[bool, placement] = True
    """Spread the samples of every shard over all devices; false: one device."""

    def validate(self, context: PlanContext) -> list[Problem]:
        """Return problems: packages to install, and settings that XLA does not support."""
        problems = [*(_package_problems() or _device_problems()), *self.launch_problems(context.launch)]
        if context.numerics.reproducible:
            rule = "XLA chooses the order of sums itself. Use strategy=mirrored, or leave it out."
            problems.append(Problem(key="numerics.reproducible", value=True, rule=rule))
        if context.precision == "fp16_mixed":
            rule = "TPUs compute in bfloat16, which needs no loss scale. Use precision=bf16_mixed."
            problems.append(Problem(key="precision", value="fp16_mixed", rule=rule))
        return problems

    def notes(self, model: nn.Module, context: PlanContext) -> tuple[str, ...]:  # noqa: ARG002 - the same of any
        """Return a note about random numbers."""
        return ("XLA has its own random generator: dropout equals that of other devices only in distribution.",)

    def tasks(self, context: PlanContext) -> tuple[Task, ...]:  # noqa: ARG002
        """Return one task for all devices."""
        return (Task(role="worker", index=0, rank=0, device="xla:0"),)

    def setup(self, request: SetupRequest) -> TpuExecutor:
        """Move the model to the XLA device; with SPMD, to all of them as one."""
        if self.spmd:
            _xla("runtime").use_spmd()  # before the first tensor exists
        parts = build_parts(request, placement=SingleDevicePlacement(device=_xla().device()))
        for optimizer in parts.stepper.optimizers:
            _unfuse(optimizer)  # XLA has no fused kernels
        return TpuExecutor(Replica(parts), request.training, make_step=_spread_work if self.spmd else _XlaWork)


class TpuExecutor(SynchronousExecutor[Replica]):
    """A replica whose steps XLA traces and compiles."""

    def _update(
        self, work: ShardStep, sums: Sequence[Tensor | None], training: StepContext | None = None
    ) -> StepOutcome:
        """Trace the update and hand the step to the device."""
        outcome = super()._update(work, sums, training)
        _xla().sync()
        return outcome


class _XlaWork(ShardStep):
    """A try at a step; the random numbers of the device are keyed by step and shard."""

    def _forward(self, shard: int, batch: Batch) -> Loss:
        key = key32(self.replica.numerics.seed, self.ticket.step, shard)
        _xla("core.xla_model").set_rng_state(key)
        return super()._forward(shard, batch)


def _spread_work(replica: Replica, ticket: Ticket, batches: Sequence[Batch], training: StepContext) -> ShardStep:
    """Return a try at a step whose batches are spread over all devices."""
    return _XlaWork(replica, ticket, [_spread_out(batch) for batch in batches], training)


def _package_problems() -> list[Problem]:
    """Return the problem of each package that XLA needs and that is not installed."""
    install = f"pip install 'torch=={_VERSION}' 'torch_xla[tpu]=={_VERSION}'"
    if find_spec("torch_xla") is None:
        rule = f"strategy=tpu needs it, and it is not installed. In an environment of its own: {install}."
        return [Problem(key="torch_xla", rule=rule)]
    torch_minor, xla_minor = _minor(torch.__version__), _minor(_xla().__version__)
    if torch_minor != xla_minor:
        rule = f"version {xla_minor} does not work with torch {torch_minor}. In an environment of its own: {install}."
        return [Problem(key="torch_xla", rule=rule)]
    return []


def _device_problems() -> list[Problem]:
    """Return a problem if XLA finds no device; must run before torch's first backward pass, which counts devices."""
    try:
        _xla("runtime").global_runtime_device_count()
    except (RuntimeError, OSError) as error:
        reason = f"finds no device ({first_line(error)})."
        rule = f"{reason} On a TPU host set PJRT_DEVICE=TPU; PJRT_DEVICE=CPU tries it on the CPU."
        return [Problem(key="torch_xla", rule=rule)]
    return []


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _xla(part: str = "") -> Any:
    """Return a module of torch_xla, imported on first use because it claims the devices of the host."""
    return importlib.import_module(f"torch_xla.{part}" if part else "torch_xla")


def _unfuse(optimizer: torch.optim.Optimizer) -> None:
    for group in [optimizer.defaults, *optimizer.param_groups]:
        if group.get("fused"):
            group["fused"], group["foreach"] = False, False


def _spread_out(batch: Batch) -> Batch:
    """Return a batch whose samples are distributed evenly over the devices, if their number allows it."""
    count = _xla("runtime").global_runtime_device_count()
    sharding = _xla("distributed.spmd")
    mesh = sharding.Mesh(list(range(count)), (count,), ("samples",))

    def mark(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() and value.shape[0] % count == 0:
            sharding.mark_sharding(value, mesh, ("samples", *[None] * (value.dim() - 1)))
        return value

    spread: Batch = tree_map(mark, batch)
    return spread
