"""Embedding tables of which a shard needs only a few rows, which are pulled when they are looked up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["read_when_looked_up", "sparse_tables"]


def sparse_tables(model: nn.Module) -> dict[int, nn.Module]:
    """Return the tables with sparse gradients, by their index among the trainable parameters.

    A table whose weight another module uses as well is excluded: that module needs the full weight.

    Example:
        >>> list(sparse_tables(nn.Sequential(nn.Linear(2, 2), nn.Embedding(9, 2, sparse=True))))
        [2]
    """
    trained = [param for param in model.parameters() if param.requires_grad]
    places = {id(param): place for place, param in enumerate(trained)}
    uses = Counter(id(param) for module in model.modules() for param in module._parameters.values())  # noqa: SLF001
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    found = ((id(table.weight), table) for table in tables if table.sparse and table.weight.requires_grad)
    return {places[key]: table for key, table in found if uses[key] == 1}


def read_when_looked_up(tables: Mapping[int, nn.Module], pull_rows: Callable[[int, Tensor], Tensor]) -> None:
    """Pull the rows that a table needs before each of its lookups.

    Args:
        tables: from `sparse_tables`.
        pull_rows: (index, (n,) rows) -> (n, ...) their values.
    """
    for place, table in tables.items():
        table.register_forward_pre_hook(_reader(place, pull_rows), with_kwargs=True)


def _reader(place: int, pull_rows: Callable[[int, Tensor], Tensor]) -> Callable[..., None]:
    @torch.no_grad()
    def read(table: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rows = torch.unique(args[0] if args else kwargs["input"])
        weight = table.weight.data
        weight[rows] = pull_rows(place, rows).to(weight)

    return read
