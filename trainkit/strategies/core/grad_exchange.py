"""Which gradients a step exchanges: most as parts of one vector, sparse ones as rows, unused ones not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainkit.errors import TrainingError
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.core.sparse import gather_sparse, sparse_figures

__all__ = ["agree_on_exchanged_grads", "scatter_to_all_params"]


def agree_on_exchanged_grads(replica: Replica, used: Sequence[int], sparse_dims: Sequence[int]) -> None:
    """Keep what the ranks together have seen of the gradients in a first shard each.

    Args:
        replica: where it is kept.
        used: a parameter's flag is 0 where no rank saw a gradient.
        sparse_dims: how many dims of its gradient are sparse, 0 where it is dense.

    Raises:
        TrainingError: a parameter got none, and the strategy does not allow that; or the optimizer refuses what a
            reproducible run makes of sparse gradients.
    """
    some_unused = not all(used)
    if some_unused and replica.refuses_unused:
        raise TrainingError(_unused([name for name, flag in zip(replica.params, used, strict=True) if not flag]))
    sparse = {place: dims for place, dims in enumerate(sparse_dims) if dims}
    in_lanes = replica.lanes is not None
    if sparse and in_lanes and isinstance(replica.stepper.optimizer, torch.optim.SparseAdam):
        raise TrainingError(
            "numerics.reproducible adds up sparse gradients as dense ones, which torch.optim.SparseAdam refuses. "
            "Use Adam or Adagrad, or leave numerics.reproducible out."
        )
    apart = {} if in_lanes or replica.num_ranks == 1 else sparse
    exchanged = [place for place, flag in enumerate(used) if flag and place not in apart]
    replica.set_exchange(
        used=[bool(flag) for flag in used], sparse=sparse, exchanged=exchanged if some_unused or apart else None
    )


def scatter_to_all_params(
    replica: Replica, sums: Sequence[Tensor | None], sparse: Mapping[int, Tensor | None]
) -> list[Tensor | None]:
    """Return a gradient per parameter, then buffers and weight: reduced ones, sparse ones, None for unused ones.

    Collective where there are sparse ones.

    Args:
        replica: knows the places.
        sums: what the reducer gave: gradients of `replica.exchanged`, then the rest.
        sparse: this rank's sums of the sparse ones, by place; empty where it had no shard.
    """
    exchanged = replica.exchanged or []
    found: list[Tensor | None] = [None] * len(replica.params)
    for place, total in zip(exchanged, sums, strict=False):
        found[place] = total
    if replica.sparse and replica.lanes is None:
        masters, totals, sent = list(replica.masters.values()), {}, 0
        for place, dims in replica.sparse.items():
            like, collective = masters[place], replica.data_ranks
            totals[place], size = gather_sparse(sparse.get(place), like, sparse_dim=dims, collective=collective)
            found[place] = totals[place]
            sent += size
        replica.step_metrics.update(sparse_figures(totals, sent, replica.num_ranks))
    return [*found, *sums[len(exchanged) :]]


def _unused(names: list[str]) -> str:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"no gradient in the first step for {shown}. Freeze what is not trained (requires_grad=False), or set "
        "strategy.allow_unused=true, which leaves it out of the exchange."
    )
