"""The largest number of rows of tables with sparse gradients that a step reads, and their exchange between replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor, nn

from trainkit.strategies.traffic.flows import all_gather, joined
from trainkit.strategies.traffic.transfers import StepCut, Transfer

AT_MOST: Final = (
    "the rows of sparse tables are counted as if each lookup of a step read a different row: equal indices reduce "
    "their number."
)
"""The note of transfers of rows."""
_INT32: Final = 2**31


def sparse_tables(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """Return the tables with sparse gradients, by name.

    A table whose weight another module uses as well is excluded: the sum of its gradients is dense.

    Example:
        >>> list(sparse_tables(nn.Sequential(nn.Linear(2, 2), nn.Embedding(9, 2, sparse=True))))
        ['1']
    """
    uses = Counter(id(param) for module in model.modules() for param in module._parameters.values())  # noqa: SLF001
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        and module.sparse
        and module.weight.requires_grad
        and uses[id(module.weight)] == 1
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Lookups:
    """The lookups of a table in a shard."""

    table: nn.Embedding | nn.EmbeddingBag
    indices: int
    """Number of indices of the forward pass."""
    reads: int
    """Number of indices of the forward pass and of its recomputation in backward."""
    calls: int
    """Number of lookups in sequence, including recomputed ones."""

    def rows(self, shards: int) -> int:
        """Return the largest number of rows that `shards` shards read."""
        return min(self.indices * shards, self.table.num_embeddings)


def lookups_of(model: nn.Module, cut: StepCut) -> Mapping[str, Lookups] | None:
    """Return the lookups of a shard in each table with sparse gradients; None if they are not known before the run.

    Args:
        model: the model; unchanged.
        cut: the cut of a step, with a dry run.
    """
    tables = sparse_tables(model)
    if not tables:
        return {}
    calls = None if cut.dry_run is None else cut.dry_run.calls(tables)
    if calls is None or any(call.given is None for call in calls):
        return None
    found = {}
    for name, table in tables.items():
        sizes = [(call.given.numel, call.is_again) for call in calls if call.name == name and call.given is not None]
        found[name] = Lookups(
            table=table,
            indices=sum(size for size, is_again in sizes if not is_again),
            reads=sum(size for size, _ in sizes),
            calls=len(sizes),
        )
    return found


def weights_of(lookups: Mapping[str, Lookups]) -> list[Tensor]:
    """Return the weights of tables."""
    return [one.table.weight for one in lookups.values()]


def gathered_rows(
    lookups: Mapping[str, Lookups], ranks: Sequence[int], *, shards: int, width: int
) -> tuple[Transfer, ...]:
    """Return the exchange of sparse gradients between replicas: every rank gathers the rows and values of all ranks.

    Args:
        lookups: the lookups of a shard, by the name of the table.
        ranks: the replicas.
        shards: number of shards of the replica with the most.
        width: bytes of an element of a gradient.
    """
    if not lookups or len(ranks) == 1:
        return ()
    flows = []
    for one in lookups.values():
        index = 4 if one.table.num_embeddings < _INT32 else 8
        row = index + one.table.embedding_dim * width
        flows.append(all_gather(ranks, len(ranks) * one.rows(shards) * row))
    return (
        Transfer(
            what="rows of sparse gradients",
            how="all-gather",
            flows=joined(*flows),
            messages=4 * len(lookups) * (len(ranks) - 1),  # lengths and tensors, of indices and of values
            note=AT_MOST,
        ),
    )
