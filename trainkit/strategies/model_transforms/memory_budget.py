"""Compile graphs that keep a given share of their activations: `compile.memory_budget`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import GraphModule

from trainkit.errors import TrainingError
from trainkit.numerics.generators import GENERATORS_LOCK, GeneratorStates

BACKENDS: Final = ("inductor", "aot_eager", "aot_eager_decomp_partition")
"""The backends of torch.compile that split a graph into forward and backward, and choose the tensors that are kept
between them.
"""


@dataclass(frozen=True)
class BudgetedBackend:
    """A backend of torch.compile with a limit on the tensors kept for backward.

    Source: `torch._functorch.config.activation_memory_budget`, which is read when a graph is compiled. It is set for
    that time alone: other models of the process are not affected.
    """

    backend: str
    """One of `BACKENDS`."""
    mode: str | None
    """A mode of the inductor backend; None for any other."""
    budget: float
    """Share from 1 (what the backend keeps without a limit) to 0 (only the inputs of a graph)."""

    def __call__(self, graph: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        """Compile a graph."""
        from torch._dynamo.backends.registry import lookup_backend  # noqa: PLC0415 - slow to import
        from torch._functorch import config  # noqa: PLC0415 - slow to import

        patches = torch._inductor.list_mode_options(self.mode) if self.mode else {}  # noqa: SLF001 - the public function
        options = {"config_patches": patches} if patches else {}
        with config.patch(activation_memory_budget=self.budget):
            compiled: Callable[..., Any] = lookup_backend(self.backend)(graph, list(inputs), **options)
        return _FirstRunChecked(compiled)


class _FirstRunChecked:
    """A compiled graph whose first run shows whether it draws random numbers: its random operations are fixed."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self._compiled, self._is_checked = compiled, False

    def __call__(self, *args: Any) -> Any:
        if self._is_checked:
            return self._compiled(*args)
        with GENERATORS_LOCK:
            before = GeneratorStates({one.device for one in args if isinstance(one, Tensor)})
            found = self._compiled(*args)
            if before.moved():
                raise TrainingError(
                    "compile.memory_budget: the model draws random numbers, and a compiled backward pass would draw "
                    "different ones from the forward pass. Set its dropout to 0, or leave the key out."
                )
        self._is_checked = True
        return found
