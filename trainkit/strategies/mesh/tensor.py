"""Shard the parameters of a model, and exchange activations between its modules.

Parameters become this rank's parts, as plain tensors: the module's own code uses them like any weight. Inputs and
outputs change their layout by DTensor, in the forward pass and, by autograd, in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional

from trainkit.errors import TrainingError
from trainkit.numerics.generators import mix64, name_id
from trainkit.strategies.mesh.state import ShardSlice
from trainkit.strategies.mesh.tensor_plan import MatchedModule, MatchedPlan


class ActivationRngRegions:
    """Sets the keys of the default generators on entering and leaving sharded activations.

    Only the last key is stored between calls: a recomputed block uses the same keys again.

    Args:
        devices: the devices whose generators the model uses (the CPU's is always included).
        compiled: whether modules of the model are compiled: a graph must not hold a key as a constant.
    """

    def __init__(self, *, place: int, devices: Sequence[torch.device], draws: bool, compiled: bool = False) -> None:
        self._place = place
        self.enter: Callable[[str], None] = self._enter
        """Set this rank's key, because activations are sharded from here on in the module of a name."""
        self.leave: Callable[[str], None] = self._leave
        """Set a common new key, because activations are full again and every rank must draw the same."""
        if compiled and draws:
            outside: Callable[..., Any] = torch.compiler.disable
            self.enter, self.leave = outside(self._enter), outside(self._leave)
        self._generators = [torch.default_generator] if draws else []
        if draws:
            self._generators += [torch.cuda.default_generators[d.index or 0] for d in devices if d.type == "cuda"]
        self._inside: tuple[int, int] | None = None  # the key inside, and the previous one

    def _enter(self, name: str) -> None:
        for generator in self._generators[:1]:
            before = generator.initial_seed()
            if self._inside is None or before != self._inside[0]:
                inside = mix64(mix64(before ^ name_id(name)) ^ (self._place + 1)) & 0xFFFFFFFF
                self._inside = inside, before
                self._set(inside)

    def _leave(self, name: str) -> None:
        for generator in self._generators[:1]:
            if self._inside is not None and generator.initial_seed() == self._inside[0]:
                self._set(mix64(self._inside[1] ^ name_id(name)) & 0xFFFFFFFF)

    def _set(self, key: int) -> None:
        for generator in self._generators:
            generator.manual_seed(key)


def cut_parameters(
    model: nn.Module, fit: MatchedPlan, *, place: int, degree: int, is_first: bool
) -> dict[str, ShardSlice]:
    """Reduce each parameter to the part of this rank.

    Returns:
        The slice of each parameter, by canonical name.
    """
    cuts = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        offset, size, dim = [0] * len(shape), list(shape), fit.dims.get(name)
        if dim is not None:
            size[dim] //= degree
            offset[dim] = size[dim] * place
        is_written = is_first and (dim is not None or place == 0)
        cut = ShardSlice(offset=tuple(offset), size=tuple(size), shape=shape, is_written=is_written)
        cuts[name] = cut
        if dim is not None:
            parameter.data = cut.take(parameter.data).contiguous()
    return cuts


def exchange_activations(fit: MatchedPlan, exchange: Exchange) -> None:
    """Make the modules of a plan change the layout of their inputs and outputs."""
    for one in fit.chosen:
        module: Any = one.module
        module.forward = partial(_forward, one, exchange, module.forward)
        if one.style.name == "colwise_gathered" and isinstance(module, nn.Linear):
            # an objective may compute its loss from the scores of each rank, without gathering them
            module.forward.cut_vocabulary = exchange.vocabulary_part(module)


@dataclass(frozen=True)
class VocabularyPart:
    """The tokens whose scores one rank computes, and the collectives with the ranks of the other tokens."""

    mesh: DeviceMesh
    """The ranks of one replica."""
    start: int
    """The first token of this rank."""

    def __deepcopy__(self, memo: dict[int, Any]) -> VocabularyPart:
        """Return this object: a copy of the model is on the same ranks."""
        return self

    def largest(self, tensor: Tensor) -> Tensor:
        """Return the elementwise maximum over the ranks; collective. The tensor is overwritten."""
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def total(self, tensor: Tensor) -> Tensor:
        """Return the elementwise sum over the ranks; collective. The tensor is overwritten."""
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def _reduced(self, tensor: Tensor, op: Any) -> Tensor:
        dist.all_reduce(tensor, op=op, group=self.mesh.get_group())
        return tensor


class Exchange:
    """Changes the layout of tensors between the ranks of one mesh."""

    def __init__(self, mesh: DeviceMesh, regions: ActivationRngRegions) -> None:
        self.mesh, self.regions = mesh, regions
        self.place, self.degree = mesh.get_local_rank(), mesh.size()

    def __deepcopy__(self, memo: dict[int, Any]) -> Exchange:
        """Return this object: a copy of the model is on the same ranks."""
        return self

    def vocabulary_part(self, layer: nn.Linear) -> VocabularyPart:
        """Return the tokens whose scores this rank computes in a cut layer."""
        return VocabularyPart(self.mesh, start=self.place * layer.weight.shape[0])

    def changed(self, tensor: Tensor, layout: Placement, to: Placement, *, used_by_parts: bool = False) -> Tensor:
        """Return a tensor in another layout.

        Args:
            tensor: the tensor of this rank, in `layout`.
            layout: its layout.
            to: the required layout.
            used_by_parts: whether every rank uses it for its own part of the result, so that gradients are parts of a
                sum.
        """
        spread = DTensor.from_local(tensor, self.mesh, (layout,), run_check=False)
        if layout != to:
            spread = spread.redistribute(placements=(to,))
        changed: Tensor = spread.to_local(grad_placements=(Partial(),) if used_by_parts else None)
        return changed

    @contextmanager
    def summed_gradients(self, module: nn.Module, names: Sequence[str]) -> Iterator[None]:
        """Sum the gradients of full parameters over the ranks, each of which uses them for its part of the sequence."""
        own = module._parameters  # noqa: SLF001 - modules read their parameters from it
        found: dict[str, nn.Parameter] = {name: param for name in names if (param := own[name]) is not None}
        try:
            for name, param in found.items():
                own[name] = self.changed(param, Replicate(), Replicate(), used_by_parts=True)  # type: ignore[assignment]
            yield
        finally:
            own.update(found)


def _forward(one: MatchedModule, exchange: Exchange, inner: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Run the forward of a sharded module, in the layouts of its plan."""
    style, module = one.style, one.module
    if style.name == "sequence":
        with exchange.summed_gradients(module, list(module._parameters)):  # noqa: SLF001
            return inner(*args, **named)
    if style.name == "sequence_split":
        return _stretch(one, exchange, inner(*args, **named))
    if style.name == "sequence_join":
        return inner(exchange.changed(args[0], Shard(1), Replicate()), *args[1:], **named)
    if style.sums:
        exchange.regions.leave(one.name)
        return _rowwise(one, exchange, args[0])
    takes = Shard(1) if style.takes == "stretch" else Replicate()
    # the inputs of an embedding are token ids, which have no gradient
    takes_numbers = isinstance(module, nn.Embedding)
    given = args[0] if takes_numbers else exchange.changed(args[0], takes, Replicate(), used_by_parts=True)
    outputs = inner(given, *args[1:], **named)
    if style.gives == "whole":
        return exchange.changed(outputs, Shard(outputs.dim() - 1), Replicate())
    exchange.regions.enter(one.name)
    return outputs


def _rowwise(one: MatchedModule, exchange: Exchange, given: Tensor) -> Tensor:
    """Sum the partial results of all ranks, and add the bias, which is not sharded, once."""
    module: Any = one.module
    to = Shard(1) if one.style.gives == "stretch" else Replicate()
    if isinstance(module, nn.Embedding):
        return exchange.changed(_own_rows(module, given, exchange.place), Partial(), to)
    if one.style.takes == "whole":
        given = exchange.changed(given, Replicate(), Shard(given.dim() - 1))
    total = exchange.changed(functional.linear(given, module.weight), Partial(), to)
    if module.bias is None:
        return total
    if one.style.gives == "whole":
        return total.add(module.bias)
    with exchange.summed_gradients(module, ["bias"]):
        return total.add(module.bias)


def _own_rows(module: nn.Embedding, tokens: Tensor, place: int) -> Tensor:
    """Return the embeddings of the tokens whose rows are on this rank, zeros for the others."""
    count = module.weight.shape[0]
    local = tokens - count * place
    absent = (local < 0) | (local >= count)
    padding = module.padding_idx
    if padding is not None:
        padding = padding - count * place if 0 <= padding - count * place < count else None
    rows = functional.embedding(local.masked_fill(absent, 0), module.weight, padding_idx=padding)
    return rows.masked_fill(absent.unsqueeze(-1), 0.0)


def _stretch(one: MatchedModule, exchange: Exchange, outputs: Tensor) -> Tensor:
    if outputs.shape[1] % exchange.degree:
        raise TrainingError(
            f"{one.name} gives sequences of {outputs.shape[1]}, which {exchange.degree} ranks along tensor do not "
            f"divide: sequence_split needs parts of equal length. Use another length, or a plan without sequence."
        )
    return exchange.changed(outputs, Replicate(), Shard(1))
