"""How a module is sharded over the ranks of a replica: the dim of its weights, and the layouts of its input and output.

Activations between modules are plain tensors in one of three layouts: *whole* on every rank, *cut* in the last dim
(features), or a *stretch* of dim 1 (the sequence).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from torch import nn

__all__ = ["STYLES", "Layout", "Style"]

Layout = Literal["whole", "cut", "stretch"]


@dataclass(frozen=True, kw_only=True)
class Style:
    """One way to shard a module."""

    name: str
    """Its name in a plan."""
    linear: Mapping[str, int] | None = None
    """Parameter -> the sharded dim, of an nn.Linear; None: the style does not support it."""
    embedding: Mapping[str, int] | None = None
    """The same for an nn.Embedding."""
    other: bool = False
    """Whether it supports any module: only activations are sharded."""
    takes: Layout = "whole"
    """The layout of its input."""
    gives: Layout = "whole"
    """The layout of its output."""
    sums: bool = False
    """Whether every rank's output is a part of a sum that must be added up."""

    def dims(self, module: nn.Module) -> Mapping[str, int] | None:
        """Return parameter -> the sharded dim; None if the style does not support such a module."""
        if isinstance(module, nn.Linear):
            return self.linear
        if isinstance(module, nn.Embedding):
            return self.embedding
        return {} if self.other else None

    @property
    def suits(self) -> str:
        """The supported modules, as text."""
        kinds = [name for name, dims in (("nn.Linear", self.linear), ("nn.Embedding", self.embedding)) if dims]
        return " and ".join(kinds) or "modules that keep their weights whole"


_ROWS: Final = {"weight": 0, "bias": 0}
_COLUMNS: Final = {"weight": 1}

STYLES: Final = {
    style.name: style
    for style in (
        Style(name="colwise", linear=_ROWS, embedding=_COLUMNS, gives="cut"),
        Style(name="colwise_gathered", linear=_ROWS, embedding=_COLUMNS),
        Style(name="colwise_sequence", linear=_ROWS, takes="stretch", gives="cut"),
        Style(name="rowwise", linear=_COLUMNS, embedding={"weight": 0}, takes="cut", sums=True),
        Style(name="rowwise_scattered", linear=_COLUMNS, sums=True),
        Style(name="rowwise_sequence", linear=_COLUMNS, takes="cut", gives="stretch", sums=True),
        Style(name="sequence", other=True, takes="stretch", gives="stretch"),
        Style(name="sequence_split", other=True, gives="stretch"),
        Style(name="sequence_join", other=True, takes="stretch"),
    )
}
"""Style by its name in a plan."""
