"""Limits that several strategies share, found before any process starts."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainkit.cluster.launch import LaunchEnvironment
from trainkit.errors import Problem
from trainkit.strategies.base import PlanContext
from trainkit.strategies.core.elementwise import whole_reason


def no_rollback(because: str, facts: PlanContext) -> list[Problem]:
    """Return the problem of `numerics.on_nonfinite=rollback` if a second pass would be a different training."""
    if facts.numerics.on_nonfinite != "rollback":
        return []
    rule = f"trains the same steps again, and {because}: a second pass is a different training. Use skip or stop."
    return [Problem(key="numerics.on_nonfinite", value="rollback", rule=rule)]


def async_problems(context: PlanContext) -> list[Problem]:
    """Return the problems of settings that asynchronous updates do not support."""
    problems = no_rollback("strategy.mode=async applies gradients as they arrive", context)
    if context.numerics.reproducible:
        rule = "asynchronous updates come in another order every time. Use strategy.mode=sync, or false."
        problems.append(Problem(key="numerics.reproducible", value=True, rule=rule))
    return problems


def phase_problems(context: PlanContext) -> list[Problem]:
    """Return the problem of an objective with phases, for a strategy that makes one update of a step."""
    phases = () if context.objective is None else context.objective.phases
    if not phases:
        return []
    rule = f"{type(context.objective).__name__} has the phases {', '.join(phases)}, and here all optimizers step "
    return [Problem(key="optimizers", rule=f"{rule}together. Use strategy=mirrored.")]


def counted_statistics_problems(model: nn.Module, context: PlanContext, *, because: str) -> list[Problem]:
    """Return the problem of an average whose batch statistics are computed again, for a model that has some."""
    counts = context.average is not None and context.average.counts_statistics
    if not counts or not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return []
    rule = f"computes batch statistics again at the end, and {because}. Use average=ema, or strategy=mirrored."
    return [Problem(key="average", value="swa", rule=rule)]


def copies_problems(model: nn.Module) -> list[Problem]:
    """Return a problem for each module whose copies in several processes or threads would not be those of one device.

    Example:
        >>> model = nn.Sequential(nn.Embedding(3, 2), nn.Embedding(3, 2, max_norm=1.0), nn.SyncBatchNorm(2))
        >>> [problem.rule[:20] for problem in copies_problems(model)]
        ['Embedding(3, 2, max_', '2 is a SyncBatchNorm']
    """
    tables = [one for one in model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag)]
    synchronised = [name for name, one in model.named_modules() if isinstance(one, nn.SyncBatchNorm)]
    changes = "changes its weight in each forward pass (max_norm), by the samples of one process or thread only. Use "
    changes += "strategy=one_device, or scale the rows in `forward`."
    shard = "is a SyncBatchNorm, and batch statistics are those of a shard on any number of replicas. Use BatchNorm2d."
    found = [f"{table} {changes}" for table in tables if table.max_norm is not None]
    return [Problem(key="model", rule=rule) for rule in [*found, *(f"{name} {shard}" for name in synchronised)]]


def hook_problems(model: nn.Module) -> list[Problem]:
    """Return the problem of a parameter with a hook on its gradient, for a run that does not call it.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> handle = model.weight.register_hook(lambda grad: grad / 2)
        >>> [problem.rule[:33] for problem in hook_problems(model)]
        ['weight has a hook on its gradient']
    """
    places = ("_backward_hooks", "_post_accumulate_grad_hooks")  # have no public names
    hooked = (name for name, param in model.named_parameters() if any(getattr(param, place) for place in places))
    rule = "has a hook on its gradient, which only eager steps of one_device, mirrored, multi_worker_mirrored, "
    rule += "device_map and local_sgd call. Use such steps (compile.mode=off), or change the gradient in `forward`."
    return [Problem(key="model", rule=f"{name} {rule}") for name in hooked][:1]


def launch_problems(launch: LaunchEnvironment | None, *, named: str, called: str = "it") -> list[Problem]:
    """Return the problem of processes that an external launcher started and that have no work."""
    if launch is None or launch.num_ranks == 1:
        return []
    started = f"{launch.kind} started {launch.num_ranks} processes"
    rule = f"{started}, and {called} has work for one. Use strategy=multi_worker_mirrored."
    return [Problem(key="strategy", value=named, rule=rule)]


def optimizer_problems(
    facts: PlanContext, *, parts: str = "here a rank has only parts of them", instead: str = "strategy=mirrored"
) -> list[Problem]:
    """Return a problem for each optimizer of the run that cannot update parts of parameters, as `whole_problem`."""
    kinds = {f"optimizers.{name}._target_": kind for name, kind in facts.optimizers.items()}
    found = [
        whole_problem(key, kind, facts, parts, instead)
        for key, kind in (kinds or {"optimizer._target_": facts.optimizer}).items()
    ]
    return [problem for problem in found if problem is not None]


def whole_problem(key: str, kind: type | None, facts: PlanContext, parts: str, instead: str) -> Problem | None:
    """Return the problem of an optimizer that cannot update parts of parameters.

    Args:
        key: the full key of its class.
        kind: the class; None if a function builds it.
        facts: the functions that build it.
        parts: who has only parts of the parameters, for the message.
        instead: the settings with which whole parameters are updated.
    """
    why = whole_reason(kind, facts.optimizer_makers.get(key, ()))
    if why is None:
        return None
    name = "The optimizer of this function" if kind is None else kind.__name__
    remedy = (
        "" if why.startswith("uses") else ", declare elementwise = True in its class if it updates each element alone"
    )
    rule = f"{name} {why}, and {parts}. Use an elementwise optimizer (torch.optim.AdamW){remedy}, or {instead}."
    return Problem(key=key, value=None if kind is None else f"{kind.__module__}.{kind.__qualname__}", rule=rule)
