"""The layers of a model: their outputs, parameters and floating-point operations; computed without data."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trainkit.objectives.base import Loss, Model
from trainkit.run.estimates.outlook import WorkCounter
from trainkit.run.estimates.passes import dry_pass, own_copy
from trainkit.run.planning.plan import RunPlan


@dataclass(kw_only=True)
class Layer:
    """One module without modules inside it."""

    name: str
    """Name of the layer in the model."""
    kind: str
    """Name of the class of the layer."""
    output: tuple[int, ...] | None = None
    """Shape of the first tensor that its first call returns; null if the layer is not called, or returns none."""
    parameters: int
    """Elements of the layer's own parameters."""
    trained: int
    """Elements of the layer's own parameters that are trained."""
    calls: int = 0
    """Calls in one forward pass."""
    flops: int | None = 0
    """Floating-point operations of these calls; a multiplication with an addition counts as two; null if unknown."""


@dataclass(frozen=True, kw_only=True)
class ModelSummary:
    """The layers of a model, and the output of `trainkit ls --model --json`."""

    version: Literal[1] = 1
    """Version of this document."""
    layers: Sequence[Layer]
    """The modules that hold no others, and those with parameters of their own, in the order of their definition."""
    batch: int
    """Samples of the batch for the shapes and operations."""
    flops: int | None
    """Floating-point operations of the whole forward pass; null if it cannot run without data."""
    parameters: int
    """Elements of all parameters; a shared one counts once."""
    trained: int
    """Elements of the parameters that are trained."""
    note: str = ""
    """Reason why there are no shapes and operations; empty if there are."""


def summary_of(plan: RunPlan, model: nn.Module) -> ModelSummary:
    """Return the layers of a model, for the batch of the largest shard.

    Args:
        plan: the run.
        model: the model, with or without data; unchanged.
    """
    counter, layers, opened = WorkCounter(), dict[str, Layer](), list[int]()
    objective, note, flops = own_copy(plan.components.objective), "", None

    def loss(model: Model, batch: Any) -> Loss:
        with counter:
            return objective.loss(model, batch)

    def watch(name: str, module: nn.Module, stack: ExitStack) -> None:
        """Record the calls of a module, also of its copies, until the stack closes."""
        params = [*module.parameters(recurse=False)]
        layer = layers[name] = Layer(
            name=name or "(model)",
            kind=type(module).__name__,
            parameters=sum(param.numel() for param in params),
            trained=sum(param.numel() for param in params if param.requires_grad),
        )

        def begin(_module: nn.Module, _args: Any) -> None:
            opened.append(counter.work().flops)

        def end(_module: nn.Module, _args: Any, outputs: Any) -> None:
            layer.flops = (layer.flops or 0) + counter.work().flops - opened.pop()
            layer.calls += 1
            output = next((leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)), None)
            if layer.output is None and output is not None:
                layer.output = tuple(output.shape)

        stack.callback(module.register_forward_pre_hook(begin).remove)
        stack.callback(module.register_forward_hook(end).remove)

    try:
        with ExitStack() as stack:
            for name, module in model.named_modules():
                if not [*module.children()] or [*module.parameters(recurse=False)]:
                    watch(name, module, stack)
            dry_pass(plan, model, loss=loss)
        flops = counter.work().flops
    except Exception as error:  # noqa: BLE001 - the user's model and objective may fail in any way without data
        note = f"it cannot run without data ({type(error).__name__}: {error}): no shapes and operations".splitlines()[0]
        layers = {name: replace(layer, flops=None) for name, layer in layers.items()}
    params = [*model.parameters()]
    return ModelSummary(
        layers=[*layers.values()],
        batch=plan.batch.shard_size(0, 0),
        flops=flops,
        parameters=sum(param.numel() for param in params),
        trained=sum(param.numel() for param in params if param.requires_grad),
        note=note,
    )
