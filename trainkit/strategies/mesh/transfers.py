"""The transfers between ranks of sharded layers in a step: activations, their gradients, and sums over the replicas."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from trainkit.numerics.copies import copied
from trainkit.strategies.mesh.tensor_plan import MatchedModule, MatchedPlan
from trainkit.strategies.traffic import (
    Flows,
    ModuleCall,
    StepCut,
    Transfer,
    all_gather,
    all_reduce,
    exchanged_elements,
    joined,
    reduce_scatter,
    times,
)
from trainkit.strategies.traffic.reductions import Vector, reduction
from trainkit.strategies.traffic.sharded import Gathers, sharded_traffic, together

Collective = Literal["all-reduce", "all-gather", "reduce-scatter"]


@dataclass(frozen=True, kw_only=True)
class CutRanks:
    """The ranks of a run (those of a replica are neighbours), and the widths of sent elements."""

    ranks: Sequence[int]
    """All ranks that compute."""
    degree: int
    """Number of ranks over which each layer is sharded."""
    device_type: str
    """cpu or cuda."""
    model_width: int
    """Bytes of an element of a parameter in forward and backward."""
    master_width: int
    """Bytes of an element of a summed gradient."""

    @property
    def replicas(self) -> list[Sequence[int]]:
        """The ranks of each replica."""
        return [self.ranks[first : first + self.degree] for first in range(0, len(self.ranks), self.degree)]

    @property
    def alike(self) -> list[Sequence[int]]:
        """The ranks that hold the same parts, one of each replica."""
        return [self.ranks[place :: self.degree] for place in range(self.degree)]


def activation_transfers(
    fit: MatchedPlan, calls: Sequence[ModuleCall], where: CutRanks, cut: StepCut, *, repeats: bool
) -> Iterator[Transfer]:
    """Yield the collectives of all shards of a step within the replicas, by operation.

    Args:
        fit: the plan.
        calls: calls of its modules in forward and backward of an unsharded replica.
        where: the ranks.
        cut: the shards of the step.
        repeats: whether a replica with fewer shards than others repeats one, because all of them exchange parameters.
    """
    chosen = {one.name: one for one in fit.chosen}
    totals: dict[Collective, tuple[int, int]] = {}
    for call in calls:
        one = chosen[call.name]
        for name, size in sent_by(one, _with_scores(one, call, chosen), width=where.model_width):
            count, total = totals.get(name, (0, 0))
            totals[name] = count + 1, total + size
    most = cut.shards_a_replica
    for name, (count, total) in totals.items():
        flows = joined(
            *(
                times(_flows(name, group, total, where.device_type), most if repeats else cut.shards_of(replica))
                for replica, group in enumerate(where.replicas)
            )
        )
        rounds = 2 if name == "all-reduce" or (name == "reduce-scatter" and where.device_type == "cpu") else 1
        messages = count * most * rounds * (where.degree - 1)
        yield Transfer(what="activations and their gradients", how=name, flows=flows, messages=messages)


def _flows(name: Collective, ranks: Sequence[int], num_bytes: float, device_type: str) -> Flows:
    if name == "reduce-scatter":
        return reduce_scatter(ranks, num_bytes, device_type=device_type)
    return all_reduce(ranks, num_bytes) if name == "all-reduce" else all_gather(ranks, num_bytes)


def sent_by(one: MatchedModule, call: ModuleCall, *, width: int) -> Iterator[tuple[Collective, int]]:
    """Yield the collectives of a call of a sharded module, forward and backward, and the bytes of each full tensor.

    They are those of DTensor for the layouts of `cutting`. A call that backward recomputes repeats the sends of
    forward.

    Args:
        one: the module, with its style.
        call: the call, with the tensors of an unsharded replica.
        width: bytes of an element of a parameter's gradient.

    Example:
        >>> from trainkit.strategies.mesh.tensor_plan import match_plan
        >>> from trainkit.strategies.traffic import TensorFacts
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> fit = match_plan(model, {"0": "colwise", "2": "rowwise"}, 2)
        >>> tensors = [TensorFacts(numel=numel, width=4, requires_grad=True) for numel in (12, 24, 6)]
        >>> given = [ModuleCall(name="0", given=tensors[0], returned=tensors[1])]
        >>> given += [ModuleCall(name="2", given=tensors[1], returned=tensors[2])]
        >>> [list(sent_by(one, call, width=4)) for one, call in zip(fit.chosen, given)]
        [[('all-reduce', 48)], [('all-reduce', 24)]]
    """
    if call.has_loss:
        yield from _of_loss(one, call)
        return
    yield from _forward(one, call)
    if not call.is_again:
        yield from _backward(one, call, width)


def _with_scores(one: MatchedModule, call: ModuleCall, chosen: Container[str]) -> ModuleCall:
    """Return a call with scores instead of their loss, unless the ranks compute the loss from their parts of the
    scores.
    """
    layer: Any = one.module
    parents = one.name.split(".")[:-1]
    is_within = any(".".join(parents[:end]) in chosen for end in range(1, len(parents) + 1))
    if not call.has_loss or call.given is None or (one.style.name == "colwise_gathered" and not is_within):
        return call
    if not hasattr(layer, "in_features"):  # a module around the output layer: only its inputs are exchanged
        return replace(call, has_loss=False)
    scores = replace(call.given, numel=call.given.numel // layer.in_features * layer.out_features)
    return replace(call, returned=scores, has_loss=False)


def _of_loss(one: MatchedModule, call: ModuleCall) -> Iterator[tuple[Collective, int]]:
    """Yield the exchange of an output layer whose vocabulary is sharded over the ranks.

    For each token a maximum, a sum, and two sums, in float32 at least; then the gradient of the layer's input.
    """
    layer: Any = one.module
    if call.given is None:
        return
    tokens, width = call.given.numel // layer.in_features, max(call.given.width, 4)
    yield from (("all-reduce", tokens * width * count) for count in (1, 1, 2))
    if call.given.requires_grad:
        yield "all-reduce", call.given.num_bytes


def _forward(one: MatchedModule, call: ModuleCall) -> Iterator[tuple[Collective, int]]:
    style, given, returned = one.style, call.given, call.returned
    if style.name in ("sequence", "sequence_split"):
        return
    if style.takes == "stretch" and given is not None:
        yield "all-gather", given.num_bytes
    if returned is None:
        return
    if style.sums:
        yield "reduce-scatter" if style.gives == "stretch" else "all-reduce", returned.num_bytes
    elif style.gives == "whole" and style.name != "sequence_join":
        yield "all-gather", returned.num_bytes


def _backward(one: MatchedModule, call: ModuleCall, width: int) -> Iterator[tuple[Collective, int]]:
    style, module, given, returned = one.style, one.module, call.given, call.returned
    if style.name == "sequence":
        params = module.parameters()
        yield from (("all-reduce", param.numel() * width) for param in params if param.requires_grad)
    elif style.gives == "stretch":
        if returned is not None and returned.requires_grad:
            yield "all-gather", returned.num_bytes
        bias: Any = getattr(module, "bias", None) if style.sums else None
        if bias is not None and bias.requires_grad:
            yield "all-reduce", bias.numel() * width
    if isinstance(module, nn.Embedding) or given is None or not given.requires_grad or nn.Linear not in style.cuts:
        return
    if not style.sums:
        yield "reduce-scatter" if style.takes == "stretch" else "all-reduce", given.num_bytes
    elif style.takes == "whole":
        yield "all-gather", given.num_bytes


def gradient_transfers(
    model: nn.Module,
    fit: MatchedPlan,
    where: CutRanks,
    gathers: Gathers | None,
    units: Callable[[nn.Module], Sequence[nn.Module]],
) -> tuple[Transfer, ...]:
    """Return the sums of gradients over the replicas, and the gathers of parameters that are sharded over them.

    Args:
        model: the model, possibly on the meta device; unchanged.
        fit: the plan.
        where: the ranks.
        gathers: the gathers of a step; None: each replica has its part of each layer whole.
        units: function that returns the modules that are gathered separately.
    """
    part = part_of(model, fit.dims, where.degree)
    if gathers is None:
        vector = Vector.of(exchanged_elements(part), where.master_width)
        return together([reduction("backend", group, vector, ranks_a_host=1) for group in where.alike])
    return together([sharded_traffic(part, units(part), group, gathers) for group in where.alike])


def part_of(model: nn.Module, dims: Mapping[str, int], degree: int) -> nn.Module:
    """Return the model of a rank, without data.

    Example:
        >>> part = part_of(nn.Linear(4, 6), {"weight": 0}, 2)
        >>> [tuple(param.shape) for param in part.parameters()]
        [(3, 4), (6,)]
    """
    held: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for name, param in model.named_parameters():
        shape = list(param.shape)
        if (dim := dims.get(name)) is not None:
            shape[dim] //= degree
        held[id(param)] = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=param.requires_grad)
    return copied(model, held)
