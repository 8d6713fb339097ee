"""The later part of a split backward pass: the gradients of a stage's weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge


@dataclass(frozen=True, kw_only=True)
class WeightPass:
    """Where a pass for weights starts, and which of them it reaches."""

    edges: tuple[GradientEdge, ...]
    grads: tuple[Tensor | None, ...]
    """The gradient of each edge; None starts from a loss."""
    params: tuple[nn.Parameter, ...]

    @classmethod
    def of_outputs(
        cls, outputs: Sequence[Tensor], grads: Sequence[Tensor] | None, params: Sequence[nn.Parameter]
    ) -> WeightPass:
        """Return the pass from the outputs of a stage, which also computes gradients between its layers again.

        Args:
            outputs: the outputs, or the loss.
            grads: the gradients of the outputs; None for a loss.
            params: the parameters of the stage with gradients.
        """
        pairs = zip(outputs, [None] * len(outputs) if grads is None else grads, strict=True)
        found = [(get_gradient_edge(output), grad) for output, grad in pairs if output.requires_grad]
        edges, starts = zip(*found, strict=True) if found else ((), ())
        return cls(edges=edges, grads=starts, params=tuple(params))

    def run(self) -> None:
        """Add the gradients to those of the parameters; the hooks of the parameters are called."""
        if self.edges and self.params:
            torch.autograd.backward(self.edges, self.grads, inputs=self.params)


def passes_of(groups: Sequence[Mapping[str, Any]], whole: WeightPass) -> Sequence[WeightPass]:
    """Return the passes that give each parameter its gradient once: those of torch, or only the whole one.

    Torch starts at each layer with the gradient of its output. This fails for a weight that is used twice, because the
    pass through the layers in between frees them, or adds its gradient twice; and a weight that no input of the stage
    reaches has no layer to start at.

    Args:
        groups: what `torch.distributed.pipelining` found in the pass for inputs: the layers and their weights.
        whole: the pass from the outputs.
    """
    found = list(_passes_of_layers(groups))
    reached = [id(param) for one in found for param in one.params]
    once = len(reached) == len(set(reached)) and len(reached) == len(whole.params)
    return found if once and all(len(group["intermediates"]) == 1 for group in groups) else [whole]


def _passes_of_layers(groups: Sequence[Mapping[str, Any]]) -> Iterator[WeightPass]:
    for group in groups:
        starts = [
            (GradientEdge(layer, place), grad)
            for layer, grads in zip(group["intermediates"], group.get("grads") or [], strict=False)
            for place, grad in enumerate(grads or ())
            if grad is not None
        ]
        edges, grads = zip(*starts, strict=True) if starts else ((), ())
        yield WeightPass(edges=edges, grads=grads, params=tuple(node.variable for node in group["params"]))
