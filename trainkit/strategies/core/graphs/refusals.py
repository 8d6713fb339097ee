"""Trainings that `compile.mode=step` cannot compile to graphs, found before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from trainkit.errors import Problem
from trainkit.numerics.randomness import draws_at_random
from trainkit.objectives.base import Access, needs_of
from trainkit.strategies.base import Facts, PlanContext
from trainkit.strategies.model_transforms import ModelTransforms

_DEFAULT = "Use compile.mode=default."
_SPARSE = "has no graph of sparse gradients. Use sparse=False, or compile.mode=default."


def step_problems(
    model: nn.Module,
    transforms: ModelTransforms,
    context: PlanContext,
    *,
    facts: Facts,
    strategy: str,
    device: str = "cpu",
) -> list[Problem]:
    """Return why the steps of a training cannot be graphs; none if `compile.mode` is not `step`.

    Args:
        model: the model, possibly without data.
        transforms: the requested transforms.
        context: optimizer, objective and `numerics` settings.
        facts: facts of the strategy.
        strategy: the name of the strategy, for the message.
        device: the device of the first replica.
    """
    if transforms.compile_mode != "step":
        return []
    rules = [*_of_strategy(facts, strategy), *_of_settings(context), *_of_model(model)]
    found = [Problem(key="compile.mode", value="step", rule=rule) for rule in rules]
    if transforms.cuda_graphs and not device.startswith("cuda"):
        rule = f"is for CUDA devices, and this run is on {device}. Leave it out."
        found.append(Problem(key="compile.cuda_graphs", value=True, rule=rule))
    return found


def shard_problems(model: nn.Module, *, has_drawn: bool) -> list[Problem]:
    """Return what a shard that was run shows, and the modules of the model do not: why its steps cannot be graphs.

    Args:
        model: the model, with the gradients of the shard.
        has_drawn: whether the shard has drawn random numbers.
    """
    if any(_of_model(model)):
        return []  # `step_problems` names the module
    sparse = any(param.grad is not None and param.grad.is_sparse for param in model.parameters())
    drawn = f"the model or the objective draws random numbers, which have no key inside of a graph. {_DEFAULT}"
    rules = [*([drawn] if has_drawn else ()), *([_SPARSE] if sparse else ())]
    return [Problem(key="compile.mode", value="step", rule=rule) for rule in rules]


def compiles_gradients() -> bool:
    """Return whether this torch compiles `torch.autograd.grad`, as from 2.11 on."""
    from torch._dynamo import config  # noqa: PLC0415 - slow to import, and most runs compile nothing

    return hasattr(config, "trace_autograd_ops")


def _of_strategy(facts: Facts, strategy: str) -> Iterator[str]:
    if not facts.compiles_step:
        other = "Leave it out" if facts.compiles == "nothing" else "Use compile.mode=default"
        yield f"{strategy} does not run steps as graphs. {other}, or use strategy=mirrored."
    if not compiles_gradients():
        yield f"needs torch 2.11 or newer, which compiles torch.autograd.grad. {_DEFAULT}"


def _of_settings(context: PlanContext) -> Iterator[str]:
    if context.numerics.reproducible:
        yield f"does not work with numerics.reproducible=true, whose order of summation is fixed. {_DEFAULT}"
    if context.optimizers:
        yield f"supports one update per step, and with optimizers there may be several. {_DEFAULT}"
    objective = context.objective
    if objective is not None and Access.derivatives in needs_of(objective):
        yield f"has no graph of {type(objective).__name__}, which {Access.derivatives.value}. {_DEFAULT}"


def _of_model(model: nn.Module) -> Iterator[str]:
    drawing = next((name for name, module in model.named_modules() if draws_at_random(module)), None)
    if drawing is not None:
        kind = type(model.get_submodule(drawing)).__name__
        yield f"the model draws random numbers ({drawing}: {kind}), which have no key inside of a graph. {_DEFAULT}"
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    if any(table.sparse for table in tables):
        yield _SPARSE
