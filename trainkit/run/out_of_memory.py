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
        ways = _ways_out(plan, placing=step is None)
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


def _ways_out(plan: RunPlan, *, placing: bool) -> list[_Way]:
    """What helps this run and is not done yet; while it is placed, what makes the model itself smaller comes first."""
    lasting = [*_spread(plan), *_narrower(plan)]
    passing = [*_recomputed(plan), *_smaller_shards(plan)]
    # one that cuts the model comes first in any case
    first, second = (lasting, passing) if placing else ([*lasting[:1], *passing], lasting[1:])
    return [*first, *second][:_FEWEST]


def _spread(plan: RunPlan) -> Iterator[_Way]:
    """Cut the model over several devices, one way or another."""
    count = plan.facts.num_gpus or 4
    if count < 2 or plan.parts.strategy.holds_pieces:
        return
    effect = f"about 1/{count} of the model a device, on {count} of them"
    fsdp = {"_target_": f"{_STRATEGIES}.fsdp.Fsdp", "replicas": count}
    pipeline = {"_target_": f"{_STRATEGIES}.pipeline.Pipeline", "stages": count}
    micro = max(plan.batch.global_size // count, 1)  # a shard for each replica
    if plan.batch.micro_size <= micro or plan.micro_follows:
        fits, more = replace(plan.cfg.batch, micro_size=None if plan.micro_follows else plan.batch.micro_size), ""
    else:
        fits, more = replace(plan.cfg.batch, micro_size=micro), f" batch.micro_size={micro}"
    if _can_go(plan, replace(plan.cfg, strategy=fsdp, batch=fits)):
        yield _Way(overrides=f"strategy=fsdp strategy.replicas={count}{more}", effect=effect)
    if _can_go(plan, replace(plan.cfg, strategy=pipeline)):
        yield _Way(overrides=f"strategy=pipeline strategy.stages={count}", effect=effect)


def _narrower(plan: RunPlan) -> Iterator[_Way]:
    precision = plan.parts.precision
    if precision.value == "fp64":
        yield _Way(overrides="precision=fp32", effect="half of everything")
    elif precision.compute_dtype is torch.float32:
        yield _Way(overrides="precision=bf16_mixed", effect="about half of the activations")


def _can_go(plan: RunPlan, cfg: RunConfig) -> bool:
    """Whether this model could be trained so, on this host."""
    try:
        other = make_plan(cfg, num_gpus=plan.facts.num_gpus, splits=plan.parts.datasets)
    except ConfigError:
        return False
    return not other.parts.strategy.problems_with(abstract_model(other), other.facts)


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
