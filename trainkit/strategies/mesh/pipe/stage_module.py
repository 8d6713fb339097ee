"""The module that computes one stage of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.strategies.mesh.pipe.forward import Span
from trainkit.strategies.mesh.pipe.stage_assignment import StageAssignment


class Blocks(nn.Module):
    """The blocks of a stage, and the tensors that the model owns itself.

    The modules are those of the model; nothing is copied, and the model's own names are unchanged.
    """

    def __init__(self, model: nn.Module, cut: StageAssignment, stage: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(unit.entries[0] for unit in cut.members(stage))
        inside = {id(tensor) for unit in cut.units for _, tensor in unit.tensors()}
        for number, tensor in enumerate(chain(model.parameters(), model.buffers())):
            if id(tensor) in inside:
                continue
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(f"owned_{number}", tensor)
            else:
                self.register_buffer(f"owned_{number}", tensor)

    def forward(self, run: Callable[..., tuple[Tensor, ...]], *received: Tensor) -> tuple[Tensor, ...]:
        """Compute a stage; parameters that are sharded are gathered around it."""
        return run(received)


class StageModule(nn.Module):
    """Computes a stage for inputs of one shape.

    Args:
        blocks: the blocks of the stage.
        span: its calls.
        cut: all blocks of the model.
        forward: the model's own forward pass.
        device: the device of this stage.
    """

    def __init__(
        self, blocks: Blocks, span: Span, cut: StageAssignment, forward: Callable[[Any], Any], device: torch.device
    ) -> None:
        super().__init__()
        self.blocks, self.span = blocks, span
        self._all = {unit.name: unit.entries[0] for unit in cut.units}
        self._forward, self._device = forward, device
        self.inputs: Any = None
        """Inputs of the whole model for the next microbatch; the code of every stage may read them."""

    def set_inputs(self, inputs: Any) -> None:
        """Store the inputs of the whole model for the next microbatch."""
        self.inputs = inputs

    def forward(self, *received: Tensor) -> tuple[Tensor, ...]:
        """Compute the values for the next stage from those of the previous one; the loss if the last block computes
        it.
        """
        arrived = received if self.span.first else ()
        made: tuple[Tensor, ...] = self.blocks(self._run, *arrived)
        return made

    def _run(self, received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return self.span.run(self._all, self._forward, self.inputs, received, device=self._device)
