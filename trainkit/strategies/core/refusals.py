"""Limits that several strategies share, found before any process starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn, optim
from torch.nn.modules.batchnorm import _BatchNorm

from trainkit.errors import Problem
from trainkit.strategies.base import PlanContext

MakeOptimizer = Callable[[list[nn.Parameter]], optim.Optimizer]
"""Function that builds the optimizer of a config over some parameters."""

_ELEMENTWISE: Final[frozenset[type]] = frozenset(
    {optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam, optim.RAdam,
     optim.RMSprop, optim.Rprop, optim.SGD, optim.SparseAdam}
)  # fmt: skip
_STEPS: Final = 5
_SHAPES: Final = ((6, 4), (6,))


def whole_reason(kind: type | None, makers: Sequence[MakeOptimizer] = ()) -> str | None:
    """Return why an optimizer may not update parts of parameters; None if it updates each element on its own.

    Classes of torch.optim are known. Any other class, also one derived of them, says so itself by an attribute
    (`elementwise = True`), or is tried: it steps with a tensor and, in an optimizer of its own as on a rank, with each
    of two cuts of it, along both dims. Values and state must be equal up to the rounding of float32.

    Args:
        kind: the class; None: a function of the user builds the optimizer.
        makers: one function per parameter group that the config sets; empty: the class is called with a rate only.

    Example:
        >>> whole_reason(torch.optim.AdamW), whole_reason(torch.optim.Adafactor)
        (None, 'uses whole parameters')
    """
    declared = getattr(kind, "elementwise", None)
    if kind in _ELEMENTWISE or declared:
        return None
    if declared is not None:
        return "uses whole parameters"
    for make in makers or ([] if kind is None else [partial(kind, lr=0.1)]):
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                if not _is_alike(make):
                    return "uses whole parameters"
        except Exception as error:  # noqa: BLE001 - code of the user may fail in any way
            return f"cannot be tried with cuts of a tensor ({type(error).__name__}: {error})"
    return None


def _is_alike(make: MakeOptimizer) -> bool:
    """Return whether steps with two cuts of a tensor give the cuts of what steps with the tensor give."""
    whole = _stepped(make, lambda tensor: tensor)
    cuts = [(dim, start, stop) for dim in (0, 1) for start, stop in ((0, 2), (2, _SHAPES[0][dim]))]
    for dim, start, stop in cuts:

        def part(tensor: Tensor, dim: int = dim, start: int = start, stop: int = stop) -> Tensor:
            return tensor.narrow(dim, start, stop - start) if dim < tensor.dim() else tensor

        actual = _stepped(make, part)
        if actual.keys() != whole.keys():
            return False
        for key, value in whole.items():
            expected = part(value) if tuple(value.shape) in _SHAPES else value
            tolerance = 64 * torch.finfo(torch.float32).eps * max(float(expected.abs().max()), 1e-30)
            if actual[key].shape != expected.shape or float((actual[key] - expected).abs().max()) > tolerance:
                return False
    return True


def _stepped(make: MakeOptimizer, part: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return the parameters and the state of an optimizer after some steps with parts of two tensors."""
    inputs = [torch.linspace(-1, 2, torch.Size(shape).numel()).view(shape) for shape in _SHAPES]
    params = [nn.Parameter(part(torch.sin(9 * tensor)).clone()) for tensor in inputs]
    optimizer = make(params)
    for step in range(1, _STEPS + 1):
        for param, tensor in zip(params, inputs, strict=True):
            param.grad = part(torch.cos(step * 7 * tensor) * (tensor + 1.5)).clone()
        optimizer.step()
    results = {f"param {index}": param.detach() for index, param in enumerate(params)}
    for index, param in enumerate(params):
        slots = optimizer.state[param].items()
        results.update({f"{slot} {index}": torch.as_tensor(value) for slot, value in slots if _is_number(value)})
    for index, group in enumerate(optimizer.param_groups):
        numbers = {key: value for key, value in group.items() if _is_number(value)}
        results.update({f"{key} of {index}": torch.as_tensor(value) for key, value in numbers.items()})
    return {key: value.detach().double() for key, value in results.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor | int | float)


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
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    synchronised = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    changes = "changes its weight in each forward pass (max_norm), by the samples of one process or thread only. Use "
    changes += "strategy=one_device, or scale the rows in `forward`."
    shard = "is a SyncBatchNorm, and batch statistics are those of a shard on any number of replicas. Use BatchNorm2d."
    rules = [f"{table} {changes}" for table in tables if table.max_norm is not None]
    return [Problem(key="model", rule=rule) for rule in [*rules, *(f"{name} {shard}" for name in synchronised)]]


def hook_problems(model: nn.Module) -> list[Problem]:
    """Return the problem of a parameter with a hook on its gradient, for a run that does not call it.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> handle = model.weight.register_hook(lambda grad: grad / 2)
        >>> [problem.rule[:33] for problem in hook_problems(model)]
        ['weight has a hook on its gradient']
    """
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")  # have no public names
    hooked = (name for name, param in model.named_parameters() if any(getattr(param, kind) for kind in kinds))
    rule = "has a hook on its gradient, which only eager steps of one_device, mirrored, multi_worker_mirrored, "
    rule += "device_map and local_sgd call. Use such steps (compile.mode=off), or change the gradient in `forward`."
    return [Problem(key="model", rule=f"{name} {rule}") for name in hooked][:1]


def optimizer_problems(
    facts: PlanContext, *, parts: str = "here a rank has only parts of them", instead: str = "strategy=mirrored"
) -> list[Problem]:
    """Return a problem for each optimizer of the run that cannot update parts of parameters, as `whole_problem`."""
    kinds = {f"optimizers.{name}._target_": kind for name, kind in facts.optimizers.items()}
    problems = [
        whole_problem(key, kind, facts, parts, instead)
        for key, kind in (kinds or {"optimizer._target_": facts.optimizer}).items()
    ]
    return [problem for problem in problems if problem is not None]


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
