"""Explain an out-of-memory error: which memory, how much the run needs there, and what to try instead."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from trainkit.cluster.tasks import Task
from trainkit.config.paths import shipped_conf
from trainkit.config.schema import RunConfig
from trainkit.config.targets.build import TARGET, build, resolve_target
from trainkit.config.yaml_documents import read_document
from trainkit.errors import ConfigError, OutOfMemoryError, TrainingError, TrainkitError
from trainkit.report.numbers import num_bytes
from trainkit.run.planning.build import model_transforms_of
from trainkit.run.planning.memory import Memory, memory_of, meta_model
from trainkit.run.planning.memory_errors import MemoryKind, memory_kind
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.strategies.capabilities import ShardsModel, validate_model
from trainkit.strategies.model_transforms import shaping_problems

__all__ = ["explain_oom"]

_FEWEST: Final = 3
"""Number of remedies to name, if there are so many."""
_RESERVE: Final = 64 * 2**20
"""Bytes of address space, never touched, that are freed for the report of an error: a limit may count them."""
_ON_CHIP: Final = (
    "a kernel needs more on-chip memory than {device} has. The device's own memory is not full, and a smaller batch "
    "does not help: use smaller blocks in a kernel of your own, or compile.mode=off. {error}"
)


@contextmanager
def explain_oom(plan: RunPlan, task: Task, step: Callable[[], int | None]) -> Iterator[None]:
    """Convert a failed allocation inside the block into an error that names what the run needs, and ways to need less.

    Args:
        plan: the run.
        task: the task of this process.
        step: returns the step that is being computed; None while the model is being placed.

    Raises:
        OutOfMemoryError: there was no memory, on the device, on the host or in /dev/shm.
        TrainingError: a kernel needs more on-chip memory than the device has.
    """
    reserve = _reserved()
    try:
        yield
    except Exception as error:
        reserve.close()
        kind = memory_kind(error)
        if kind is None or isinstance(error, TrainkitError):
            raise
        error.__traceback__ = None  # its frames hold the tensors that fill the memory
        at = step()
        head = f"rank {task.rank}, {'while the model was placed' if at is None else f'step {at}'}:"
        if kind is MemoryKind.on_chip:
            raise TrainingError(f"{head} {_ON_CHIP.format(device=task.device, error=_first_line(error))}") from error
        if kind is MemoryKind.shared:
            raise OutOfMemoryError(f"{head} {_shared(plan)}") from error
        if kind is MemoryKind.host and task.device != "cpu":
            raise OutOfMemoryError(f"{head} {_host(plan, task)}") from error
        raise OutOfMemoryError(
            _with_remedies(plan, f"{head} {task.device} is out of memory.", placing=at is None)
        ) from error
    finally:
        reserve.close()


def _reserved() -> ExitStack:
    """Reserve address space, freed by closing the stack; a limit that refuses it leaves a run that fits alone."""
    stack = ExitStack()
    with suppress(OSError):
        stack.enter_context(mmap.mmap(-1, _RESERVE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    return stack


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _shared(plan: RunPlan) -> str:
    workers = plan.cfg.loader.num_workers
    fewer = f"loader.num_workers={workers // 2} (now {workers}), or " if workers else ""
    return (
        "the shared memory of the host (/dev/shm), through which its processes exchange tensors, is full. To go on, "
        f"try {fewer}make it larger (docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm)."
    )


def _host(plan: RunPlan, task: Task) -> str:
    workers = plan.cfg.loader.num_workers
    ways = {
        f"loader.num_workers={workers // 2} (now {workers})": workers > 0,
        "loader.cache=false": plan.cfg.loader.cache is not False,
        "checkpoint.background=false (no copy of the checkpoint on the host)": plan.cfg.checkpoint.background,
    }
    open_ways = ", ".join(way for way, helps in ways.items() if helps)
    tried = f" To need less, try one of: {open_ways}." if open_ways else ""
    return f"the host is out of memory (RAM), not {task.device}.{tried}"


def _with_remedies(plan: RunPlan, head: str, *, placing: bool) -> str:
    try:
        memory = memory_of(plan, meta_model(plan))
        ways = _remedies(plan, placing=placing)
    except (MemoryError, RuntimeError):  # no memory is left to compute the details
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
class _Remedy:
    overrides: str
    """The overrides to add to the command line."""
    effect: str
    """The effect on the memory of a device."""


def _remedies(plan: RunPlan, *, placing: bool) -> list[_Remedy]:
    """Return remedies that are not applied yet; while the model is placed, remedies that make it smaller come first."""
    lasting = [*_spread(plan), *_reduced_precision(plan)]
    passing = [*_recomputed(plan), *_smaller_shards(plan)]
    # sharding the model comes first in any case
    first, second = (lasting, passing) if placing else ([*lasting[:1], *passing], lasting[1:])
    return [*first, *second][:_FEWEST]


def _spread(plan: RunPlan) -> Iterator[_Remedy]:
    """Yield the ways to shard the model over several devices."""
    count = plan.facts.num_gpus or 4
    if count < 2 or plan.components.strategy.traits.is_sharded:
        return
    effect = f"about 1/{count} of the model a device, on {count} of them"
    for file in sorted((shipped_conf() / "strategy").glob("*.yaml")):
        target = read_document(file).values[TARGET]
        if not issubclass(kind := resolve_target(target), ShardsModel):
            continue
        keys = kind.sharded_over(count)
        cfg, more = _with_shards_for_all(plan, {TARGET: target, **keys})
        if _can_go(plan, cfg):
            given = " ".join(f"strategy.{key}={value}" for key, value in keys.items())
            yield _Remedy(overrides=f"strategy={file.stem} {given}{more}", effect=effect)


def _with_shards_for_all(plan: RunPlan, node: Mapping[str, Any]) -> tuple[RunConfig, str]:
    """Return the config with another strategy and a shard for each replica, and the override that this needs."""
    cfg = replace(plan.cfg, strategy=dict(node))
    replicas = build(node, "strategy").num_replicas(plan.facts)
    if replicas == 1:
        return cfg, ""
    if plan.micro_size_depends_on_replicas:
        return replace(cfg, batch=replace(cfg.batch, micro_size=None)), ""
    micro = min(plan.batch.micro_size, max(plan.batch.global_size // replicas, 1))
    more = f" batch.micro_size={micro}" if micro < plan.batch.micro_size else ""
    return replace(cfg, batch=replace(cfg.batch, micro_size=micro)), more


def _reduced_precision(plan: RunPlan) -> Iterator[_Remedy]:
    precision = plan.components.precision
    if precision.value == "fp64":
        yield _Remedy(overrides="precision=fp32", effect="half of everything")
    elif precision.compute_dtype is torch.float32:
        yield _Remedy(overrides="precision=bf16_mixed", effect="about half of the activations")


def _can_go(plan: RunPlan, cfg: RunConfig) -> bool:
    """Return whether this model could be trained with a config on this host."""
    try:
        other = make_plan(cfg, num_gpus=plan.facts.num_gpus, splits=plan.components.datasets)
    except ConfigError:
        return False
    return not validate_model(other.components.strategy, meta_model(other), other.facts)


def _recomputed(plan: RunPlan) -> Iterator[_Remedy]:
    shaping = model_transforms_of(replace(plan.cfg, activation_checkpointing="full"))
    strategy = plan.components.strategy
    problems = shaping_problems(meta_model(plan), shaping, compiles=strategy.traits.compiles, strategy="")
    if plan.cfg.activation_checkpointing != "full" and not problems:
        yield _Remedy(overrides="activation_checkpointing=full", effect="keeps the inputs of each block alone")


def _smaller_shards(plan: RunPlan) -> Iterator[_Remedy]:
    micro = plan.batch.micro_size
    if micro > 1:
        yield _Remedy(
            overrides=f"batch.micro_size={(micro + 1) // 2}", effect="half of the activations, in more shards"
        )
