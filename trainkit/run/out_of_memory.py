"""A device that ran out of memory: told as such, with what the run needs there and what to try instead."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import torch

from trainkit.cluster.tasks import Task
from trainkit.config.schema import RunConfig
from trainkit.errors import ConfigError, OutOfMemoryError
from trainkit.report.numbers import num_bytes
from trainkit.run.building import shaping_of
from trainkit.run.memory import Memory, abstract_model, memory_of
from trainkit.run.plan import RunPlan, make_plan
from trainkit.strategies.shaping import shaping_problems

__all__ = ["is_out_of_memory", "telling_of_memory"]

_SAID: Final = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "std::bad_alloc")
_STRATEGIES: Final = "trainkit.strategies"
_FEWEST: Final = 3
"""Ways out to name, where there are so many."""


@contextmanager
def telling_of_memory(plan: RunPlan, task: Task, step: Callable[[], int | None]) -> Iterator[None]:
    """Make an allocation that fails inside an error that says what the run needs, and three ways to need less.

    Args:
        plan: the run.
        task: this process.
        step: the step that is being computed; None while the model is being placed.

    Raises:
        OutOfMemoryError: there was no memory, on the device or on the host.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        error.__traceback__ = None  # its frames hold the tensors that fill the memory
        raise OutOfMemoryError(_told(plan, task, step())) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that an allocation failed: CUDA's, that of torch on the CPU, Python's, or the system's.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
        (True, False)
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _SAID)


def _told(plan: RunPlan, task: Task, step: int | None) -> str:
    when = "while the model was placed" if step is None else f"step {step}"
    head = f"rank {task.rank}, {when}: {task.device} is out of memory."
    try:
        memory = memory_of(plan, abstract_model(plan))
        ways = _ways_out(plan, memory, placing=step is None)
    except (MemoryError, RuntimeError):  # there is none left to find out more
        return head
    needs = f"The run needs {num_bytes(memory.total_bytes)} a device, and activations: {_parts(memory)}."
    if not ways:
        return f"{head} {needs}"
    width = max(len(way.overrides) for way in ways)
    lines = [f"  {way.overrides:<{width}}  {way.effect}" for way in ways]
    return "\n".join([f"{head} {needs} To need less, try one of:", *lines])


def _parts(memory: Memory) -> str:
    known = {
        "parameters": memory.parameter_bytes,
        "gradients": memory.gradient_bytes + memory.exchange_bytes,
        "optimizer": memory.optimizer_bytes or 0,
    }
    return ", ".join(f"{label} {num_bytes(size)}" for label, size in known.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Way:
    overrides: str
    """What to add to the command line."""
    effect: str
    """What it does to the memory of a device."""


def _ways_out(plan: RunPlan, memory: Memory, *, placing: bool) -> list[_Way]:
    """What helps this run and is not done yet; while it is placed, what makes the model itself smaller comes first."""
    lasting = [*_spread(plan, memory), *_narrower(plan, memory)]
    passing = [*_recomputed(plan), *_smaller_shards(plan)]
    first, second = (lasting, passing) if placing else (lasting[:1] + passing, lasting[1:])
    return [*first, *second][:_FEWEST]


def _spread(plan: RunPlan, memory: Memory) -> Iterator[_Way]:
    """Cut the model over several devices, one way or another."""
    count = plan.facts.num_gpus or 4
    if count < 2 or plan.parts.strategy.holds_pieces:
        return
    fsdp = {"_target_": f"{_STRATEGIES}.fsdp.Fsdp", "replicas": count}
    yield from _planned(plan, memory, {"strategy": fsdp}, f"strategy=fsdp strategy.replicas={count}")
    pipeline = {"_target_": f"{_STRATEGIES}.pipeline.Pipeline", "stages": count}
    yield from _planned(plan, memory, {"strategy": pipeline}, f"strategy=pipeline strategy.stages={count}")


def _narrower(plan: RunPlan, memory: Memory) -> Iterator[_Way]:
    precision = plan.parts.precision
    if precision.value == "fp64":
        node = {**plan.cfg.precision, "value": "fp32"}
        yield from _planned(plan, memory, {"precision": node}, "precision=fp32")
    elif precision.compute_dtype is torch.float32:
        yield _Way(overrides="precision=bf16_mixed", effect="about half of the activations")


def _planned(plan: RunPlan, memory: Memory, changes: dict[str, object], overrides: str) -> Iterator[_Way]:
    """A way that the plan knows the bytes of, where it can be gone."""
    try:
        other = _planned_anew(plan, replace(plan.cfg, **changes))  # type: ignore[arg-type]
        model = abstract_model(other)
        if other.parts.strategy.problems_with(model, other.facts):
            return
    except ConfigError:
        return
    needed = memory_of(other, model).total_bytes
    if needed < memory.total_bytes:
        yield _Way(overrides=overrides, effect=f"{num_bytes(needed)} a device, and activations")


def _planned_anew(plan: RunPlan, cfg: RunConfig) -> RunPlan:
    return make_plan(cfg, num_gpus=plan.facts.num_gpus, splits=plan.parts.datasets)


def _recomputed(plan: RunPlan) -> Iterator[_Way]:
    shaping = shaping_of(replace(plan.cfg, activation_checkpointing="full"))
    strategy = plan.parts.strategy
    problems = shaping_problems(abstract_model(plan), shaping, compiles=strategy.compiles, strategy="")
    if plan.cfg.activation_checkpointing != "full" and not problems:
        yield _Way(overrides="activation_checkpointing=full", effect="keeps the inputs of each block alone")


def _smaller_shards(plan: RunPlan) -> Iterator[_Way]:
    micro = plan.batch.micro_size
    if micro > 1:
        yield _Way(overrides=f"batch.micro_size={(micro + 1) // 2}", effect="half of the activations, in more shards")
