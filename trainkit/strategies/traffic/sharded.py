"""The transfers of a model whose parameters are sharded over ranks: gathered by units, gradients summed in parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from trainkit.strategies.traffic.flows import all_gather, joined, reduce_scatter, times
from trainkit.strategies.traffic.reductions import Vector, reduction
from trainkit.strategies.traffic.transfers import Transfer


@dataclass(frozen=True, kw_only=True)
class Gathers:
    """Numbers and widths of the gathers and sums of the units in a step."""

    groups: int
    """Number of groups of ranks, each with a whole model."""
    device_type: str
    gathered_bytes: int
    """Bytes of an element of a gathered parameter."""
    summed_bytes: int
    """Bytes of an element of a gradient."""
    gathers: int
    """Number of forward passes, each of which gathers each unit."""
    sums: int
    """Number of sums of the gradients of each unit."""
    in_lanes: bool = False
    """Whether the sums are those of `LaneSummation`, over all groups."""
    again: bool = True
    """Whether backward gathers the units again, except the last one and the rest of the model, which stay unsharded."""


def sharded_traffic(
    model: nn.Module, units: Sequence[nn.Module], ranks: Sequence[int], how: Gathers
) -> tuple[Transfer, ...]:
    """Return the transfers of FSDP2 in a step; ranks of a group are neighbours.

    Each rank holds as many rows of a parameter as the first one, which may have more than the others: the rest is
    padding, which is also sent.
    """
    size = len(ranks) // how.groups
    if size == 1:
        return ()
    groups = [ranks[first : first + size] for first in range(0, len(ranks), size)]
    padded = [tuple(_padded(unit, size)) for unit in _unit_params(model, units)]
    whole = sum(numel for unit in padded for numel, _ in unit)
    trained = sum(numel for unit in padded for numel, trains in unit if trains)
    each, rounds = len(padded), size - 1
    again = [list(_padded(unit, size)) for unit in _gathered_again(model, units)] if how.again else []
    elements = whole + sum(numel for unit in again for numel, _ in unit)
    gathered = joined(*(all_gather(group, elements * how.gathered_bytes) for group in groups))
    summed = joined(
        *(reduce_scatter(group, trained * how.summed_bytes, device_type=how.device_type) for group in groups)
    )
    part, alike = Vector.of(trained // size, how.summed_bytes), [[group[at] for group in groups] for at in range(size)]
    copies = together([reduction("backend", group, part, ranks_a_host=1) for group in alike])
    if how.in_lanes:
        slices = trained * how.summed_bytes / len(ranks)
        summed = {(sender, receiver): slices for sender in ranks for receiver in ranks if sender != receiver}
        flows = joined(*(all_gather(group, part.num_bytes) for group in alike))
        rounds = len(ranks) - 1
        copies = tuple(replace(one, how="all-gather", flows=flows, messages=each * (how.groups - 1)) for one in copies)
    return (
        Transfer(
            what="parameters",
            how="all-gather",
            flows=times(gathered, how.gathers),
            messages=how.gathers * (each + len(again)) * (size - 1),
            overlaps=True,
        ),
        Transfer(
            what="gradients",
            how="lanes" if how.in_lanes else "reduce-scatter",
            flows=times(summed, how.sums),
            messages=how.sums * each * rounds,
            overlaps=True,
        ),
        *copies,
    )


def together(several: Sequence[tuple[Transfer, ...]]) -> tuple[Transfer, ...]:
    """Return the transfers of groups of ranks that make the same exchange at the same time."""
    return tuple(replace(alike[0], flows=joined(*(one.flows for one in alike))) for alike in zip(*several, strict=True))


def _unit_params(model: nn.Module, units: Sequence[nn.Module]) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters of each unit, and then those of the model outside of units."""
    taken: set[int] = set()
    for unit in [*units, model]:
        found = [param for param in unit.parameters() if id(param) not in taken]
        taken.update(map(id, found))
        if found:
            yield found


def _gathered_again(model: nn.Module, units: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """Return the parameters of each unit except the last one, in the order of the model."""
    chosen = set(units)
    *_, last = [model, *(module for module in model.modules() if module in chosen)]
    kept = {id(param) for param in last.parameters()}
    inside = {id(param) for unit in units for param in unit.parameters()}
    found = [[p for p in params if id(p) in inside and id(p) not in kept] for params in _unit_params(model, units)]
    return [params for params in found if params]


def _padded(params: Sequence[nn.Parameter], size: int) -> Iterator[tuple[int, bool]]:
    """Yield the elements of each parameter with its padding, and whether it is trained."""
    for param in params:
        rows = param.shape[0] if param.dim() else 1
        yield -(-rows // size) * size * (param.numel() // max(rows, 1)), param.requires_grad
