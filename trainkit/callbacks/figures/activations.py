"""Outputs of the layers of a model in the forward passes of some steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainkit.callbacks.figures.distribution import measure
from trainkit.objectives.from_hidden.output_layer import offered_by


def observed_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a model that hold no others, by name.

    The output layer that a language model offers is not among them: a step computes its loss without its scores.
    """
    without = offered_by(model)
    return {
        name: module
        for name, module in model.named_modules(remove_duplicate=True)
        if name and module is not without and not any(module.children())
    }


class Activations:
    """The distributions of the outputs of layers, added up over the forward passes of a step.

    The layers have hooks from `begin` to `end` alone: other steps run as if nothing looked on.
    """

    def __init__(self) -> None:
        self.found: dict[str, tuple[Tensor, Tensor]] = {}
        """What `distribution.measure` gives of each layer, added up."""
        self.is_forward = False
        """Whether outputs count: what backward computes again counts once."""
        self._handles: list[RemovableHandle] = []

    def begin(self, layers: Iterable[tuple[str, nn.Module]]) -> None:
        """Look at the layers from now on."""
        self.end()
        self.found = {}
        self._handles = [module.register_forward_hook(self._hook(name)) for name, module in layers]

    def end(self) -> None:
        """Remove the hooks."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        self.is_forward = False

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if not self.is_forward or not isinstance(output, Tensor) or not output.is_floating_point():
                return
            sums, extrema = measure(output)
            if name in self.found:
                before, ends = self.found[name]
                sums = sums + before
                low, high = torch.minimum(extrema[0], ends[0]), torch.maximum(extrema[1], ends[1])
                extrema = torch.stack([low, high])
            self.found[name] = sums, extrema

        return look
