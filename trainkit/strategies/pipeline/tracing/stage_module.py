"""The module that computes one stage of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from trainkit.objectives.base import Loss, found_loss
from trainkit.strategies.pipeline.stage_assignment import StageAssignment
from trainkit.strategies.pipeline.tracing.program import ParamRef, StageProgram, TensorMeta, Value


class Blocks(nn.Module):
    """The blocks of a stage, and the tensors that the model owns itself.

    The modules are those of the model; nothing is copied, and the model's own names are unchanged.
    """

    def __init__(
        self, blocks: Mapping[str, nn.Module], *, owned: Mapping[str, Tensor], inside: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        self.by_name, self.tensors = dict(blocks), {**inside, **owned}
        self.modules_here = nn.ModuleList(blocks.values())
        for number, tensor in enumerate(owned.values()):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(f"owned_{number}", tensor)
            else:
                self.register_buffer(f"owned_{number}", tensor)


def blocks_of_stage(model: nn.Module, cut: StageAssignment, stage: int) -> Blocks:
    """Return the blocks of a stage of a model, and the tensors that the model owns itself."""
    inside = {id(tensor) for unit in cut.units for _, tensor in unit.tensors()}
    owned = {name: tensor for name, tensor in _named(model) if id(tensor) not in inside}
    members = cut.members(stage)
    here = {id(tensor) for unit in members for _, tensor in unit.tensors()}
    within = {name: tensor for name, tensor in _named(model) if id(tensor) in here}
    return Blocks({unit.name: unit.entries[0] for unit in members}, owned=owned, inside=within)


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())


class StageModule(nn.Module):
    """Computes a stage for inputs of one shape."""

    def __init__(self, blocks: Blocks, stretch: StageProgram, shapes: Mapping[int, TensorMeta]) -> None:
        super().__init__()
        self.blocks, self.stretch, self.shapes = blocks, stretch, shapes
        self.inputs: Sequence[Tensor] = ()
        """Inputs of the whole model for the next microbatch; the code of every stage may read them."""

    def set_inputs(self, inputs: Sequence[Tensor]) -> None:
        """Store the inputs of the whole model for the next microbatch."""
        self.inputs = inputs

    def forward(self, *received: Tensor) -> tuple[Tensor, ...]:
        """Compute the values for the next stage from those of the previous one; the loss if the last block computes
        it.
        """
        values: dict[int, Any] = dict(enumerate(self.inputs))
        if self.stretch.received:
            copied = self.stretch.copied
            arrived = zip(self.stretch.received, received, strict=True)
            values |= {number: one.clone() if number in copied else one for number, one in arrived}
        for call in self.stretch.calls:
            args, kwargs = filled((call.args, call.kwargs), values, self.blocks.tensors)
            run = call.function if call.block is None else self.blocks.by_name[call.block]
            assert run is not None
            with nullcontext() if call.modes is None else call.modes.entered():
                made = run(*args, **kwargs)
            tree_map(_keeper(values), call.outputs, made)
        if any(isinstance(values[number], Loss) for number in self.stretch.sent):
            return (found_loss([values[number] for number in self.stretch.sent]).loss_sum,)
        for number in self.stretch.sent:
            self.shapes[number].check(values[number])
        # Sent tensors are received as contiguous ones.
        return tuple(values[number].contiguous() for number in self.stretch.sent)


def filled(tree: Any, values: Mapping[int, Tensor], held: Mapping[str, Tensor]) -> Any:
    """Replace the references in a tree by their tensors."""

    def tensor_of(leaf: Any) -> Any:
        if isinstance(leaf, Value):
            return values[leaf.number]
        return held[leaf.name] if isinstance(leaf, ParamRef) else leaf

    return tree_map(tensor_of, tree)


def _keeper(values: dict[int, Tensor]) -> Any:
    def keep(leaf: Any, made: Any) -> None:
        if isinstance(leaf, Value):
            values[leaf.number] = made

    return keep
