"""Backward passes in two parts: gradients of the inputs of a stage first, those of its weights when they are due."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
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
        roots = [(get_gradient_edge(output), grad) for output, grad in pairs if output.requires_grad]
        edges, starts = zip(*roots, strict=True) if roots else ((), ())
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
    passes = list(_passes_of_layers(groups))
    reached = [id(param) for weight_pass in passes for param in weight_pass.params]
    once = len(reached) == len(set(reached)) and len(reached) == len(whole.params)
    return passes if once and all(len(group["intermediates"]) == 1 for group in groups) else [whole]


def _passes_of_layers(groups: Sequence[Mapping[str, Any]]) -> Iterator[WeightPass]:
    for group in groups:
        starts = [
            (GradientEdge(layer, index), grad)
            for layer, grads in zip(group["intermediates"], group.get("grads") or [], strict=False)
            for index, grad in enumerate(grads or ())
            if grad is not None
        ]
        edges, grads = zip(*starts, strict=True) if starts else ((), ())
        yield WeightPass(edges=edges, grads=grads, params=tuple(node.variable for node in group["params"]))


class SplitStage(nn.Module):
    """Computes a stage whose backward pass gives the gradients of its inputs alone.

    Args:
        stage: computes the stage.
    """

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage
        self._start = torch.zeros((), requires_grad=True)  # the inputs of the first stage have no gradients
        self._pending: Sequence[WeightPass] = ()

    def forward(self, *received: Tensor) -> tuple[Tensor, ...]:
        """Compute the outputs; between them and the inputs the graph has one node."""
        outputs = self.stage(*received)
        detached: tuple[Tensor, ...] = _Inputs.apply(self, self._start, outputs, *received)  # type: ignore[no-untyped-call]
        return detached

    def input_grads(
        self, outputs: Sequence[Tensor], grads: Sequence[Tensor], received: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """Return the gradients of the inputs, and keep the passes for weights."""
        # slow to import, and needed only with stages
        from torch.distributed.pipelining._backward import stage_backward_input  # noqa: PLC0415

        params = [param for param in self.stage.parameters() if param.requires_grad]
        whole = WeightPass.of_outputs(outputs, grads, params)
        if not any(tensor.requires_grad for tensor in received):
            self._pending = [whole]
            return [None] * len(received)
        # torch detaches the outputs in place, which views refuse
        copied = [output.clone() if output._is_view() else output for output in outputs]  # noqa: SLF001 - torch's name
        received_grads, groups = stage_backward_input(copied, list(grads), list(received), iter(params))
        for tensor in received:
            tensor.grad = None  # it is returned as well
        self._pending = passes_of(groups, whole)
        return received_grads

    def weights(self) -> Callable[[], None]:
        """Return the passes that the last backward pass has left; torch calls them when they are due."""
        pending, self._pending = self._pending, ()

        def run() -> None:
            for weight_pass in pending:
                weight_pass.run()

        return run


class _Inputs(torch.autograd.Function):
    """The outputs of a stage, as if it had no weights."""

    @staticmethod
    def forward(
        ctx: Any, stage: SplitStage, _start: Tensor, outputs: Sequence[Tensor], *received: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.stage, ctx.outputs, ctx.received = stage, outputs, received
        detached = tuple(output.detach() for output in outputs)
        ctx.mark_non_differentiable(
            *(tensor for tensor, output in zip(detached, outputs, strict=True) if not output.requires_grad)
        )
        return detached

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():  # torch reads the graph through views of its leaves
            return None, None, None, *ctx.stage.input_grads(ctx.outputs, grads, ctx.received)
