"""Exchange the gradients of a step: most as parts of one vector, sparse ones as rows, unused ones not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from trainkit.errors import Problem
from trainkit.objectives.base import Collective
from trainkit.strategies.core.replica import Replica

_INT32: Final = 2**31


def gather_sparse(grad: Tensor | None, like: Tensor, *, sparse_dim: int, collective: Collective) -> tuple[Tensor, int]:
    """Return the sum of a sparse gradient over the ranks; collective.

    Every rank receives the rows of all ranks and adds equal rows in the order of the ranks: all get the same bits.

    Args:
        grad: this rank's sum over its shards, sparse; None if it had no shard.
        like: the parameter, which gives shape and device.
        sparse_dim: dims that the indices span.
        collective: the ranks.

    Returns:
        The coalesced sum, and the bytes that this rank sent to each other.
    """
    if grad is None:
        grad = torch.sparse_coo_tensor(
            torch.empty((sparse_dim, 0), dtype=torch.int64, device=like.device),
            torch.empty((0, *like.shape[sparse_dim:]), dtype=like.dtype, device=like.device),
            like.shape,
        )
    own = grad.coalesce()
    narrow = torch.int32 if max(like.shape[:sparse_dim]) < _INT32 else torch.int64
    indices = collective.gather(own.indices().t().to(narrow).contiguous())
    values = collective.gather(own.values())
    total = torch.sparse_coo_tensor(torch.cat(indices).t().long(), torch.cat(values), like.shape).coalesce()
    most = max(len(part) for part in indices)  # shorter ones are padded
    row = sparse_dim * narrow.itemsize + values[0][:1].numel() * values[0].element_size() if most else 0
    return total, most * row


def sparse_problems(model: nn.Module, why: str) -> list[Problem]:
    """Return problems of sparse embeddings; `why` names the problem with such gradients: "which are not summed"."""
    return [
        Problem(key="model", rule=f"{name} has sparse gradients, {why}. Use sparse=False.")
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    ]


def sparse_figures(totals: Mapping[int, Tensor], sent_bytes: int, num_ranks: int) -> dict[str, float]:
    """Return the metrics of the savings of a step by sparse exchange.

    Args:
        totals: sums of the sparse gradients over the ranks.
        sent_bytes: bytes that a rank sent to each other for them.
        num_ranks: ranks of the run.

    Returns:
        `sparse_density`: present elements over all elements; `sparse_saved_mb`: MiB that a rank did not send, compared
        with an all-reduce of the dense gradients, which sends 2 (n - 1) / n of them.
    """
    dense = sum(total.numel() for total in totals.values())
    dense_bytes = sum(total.numel() * total.element_size() for total in totals.values())
    present = sum(total.values().numel() for total in totals.values())
    saved = 2 * (num_ranks - 1) / num_ranks * dense_bytes - (num_ranks - 1) * sent_bytes
    return {"sparse_density": present / dense, "sparse_saved_mb": saved / 2**20}


def with_values(grads: Sequence[Tensor | None]) -> tuple[list[Tensor | None], list[Tensor]]:
    """Return the gradients, sparse ones coalesced, and the tensors of their values.

    In-place operations on the second (scaling, clipping) change the first; norms over the second are those of the full
    gradients, because absent elements are zero. The second has no empty tensors.
    """
    coalesced = [grad.coalesce() if grad is not None and grad.is_sparse else grad for grad in grads]
    held = [grad._values() if grad.is_sparse else grad for grad in coalesced if grad is not None]  # noqa: SLF001
    return coalesced, [values for values in held if values.numel()]


def scatter_to_all_params(
    replica: Replica, sums: Sequence[Tensor | None], sparse: Mapping[int, Tensor | None]
) -> list[Tensor | None]:
    """Return a gradient per parameter, then buffers and weight: reduced ones, sparse ones, None for unused ones.

    Collective if there are sparse gradients.

    Args:
        replica: gives the indices.
        sums: the result of the reducer: gradients of `replica.exchanged`, then the rest.
        sparse: this rank's sums of sparse gradients, by index; empty if it had no shard.
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
