"""The variables of a training, which the servers hold, in the order that all tasks agree on."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from trainkit.strategies.tensors.layouts import dense_strides

Kind = Literal["param", "frozen", "buffer"]
"""Trainable parameters, frozen parameters, and buffers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """A tensor that servers hold.

    Example:
        >>> Variable(name="w", kind="param", shape=(3, 5), dtype=torch.float32).row_bytes
        20
    """

    name: str
    """The canonical name."""
    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype
    """The dtype of the master parameter of a trainable parameter, else the model's own."""
    strides: tuple[int, ...] | None = None
    """The strides of a trainable parameter in the model, which its gradients and the optimizer's slots share; None:
    contiguous, as all other variables on a server.
    """
    saved: bool = True
    """Whether a checkpoint holds it; some buffers are recomputed."""

    @property
    def num_rows(self) -> int:
        """The number of rows it can be split into: its length along dim 0; a scalar is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_numel(self) -> int:
        """Number of elements of a row."""
        return math.prod(self.shape[1:])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.row_numel * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole variable."""
        return self.num_rows * self.row_bytes

    @property
    def key(self) -> str:
        """Its name in a checkpoint."""
        return f"{'buffer' if self.kind == 'buffer' else 'param'}/{self.name}"


def variables_of(model: nn.Module, master_dtype: torch.dtype) -> tuple[Variable, ...]:
    """Return trainable parameters, frozen ones, and buffers of a model, perhaps on meta, each in canonical order.

    Example:
        >>> [(v.name, v.kind) for v in variables_of(nn.BatchNorm1d(2), torch.float32)][:3]
        [('weight', 'param'), ('bias', 'param'), ('running_mean', 'buffer')]
    """
    params, saved = list(model.named_parameters()), model.state_dict()
    trained = [_variable(name, "param", param, dtype=master_dtype) for name, param in params if param.requires_grad]
    frozen = [_variable(name, "frozen", param) for name, param in params if not param.requires_grad]
    buffers = [_variable(name, "buffer", buffer, saved=name in saved) for name, buffer in model.named_buffers()]
    return (*trained, *frozen, *buffers)


def _variable(
    name: str, kind: Kind, tensor: Tensor, *, dtype: torch.dtype | None = None, saved: bool = True
) -> Variable:
    strides = dense_strides(tensor) if kind == "param" else None
    shape = tuple(tensor.shape)
    return Variable(name=name, kind=kind, shape=shape, dtype=dtype or tensor.dtype, strides=strides, saved=saved)


def tensors_of(model: nn.Module) -> list[Tensor]:
    """Return the model's own tensors, one per variable and in their order: the destination of a pull.

    Example:
        >>> [tensor.dim() for tensor in tensors_of(nn.Linear(3, 2))]
        [2, 1]
    """
    params = [param.data for param in model.parameters() if param.requires_grad]
    return [*params, *(param.data for param in model.parameters() if not param.requires_grad), *model.buffers()]


def unsaved_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that no checkpoint holds, by their names in one; they are recomputed with the model.

    Example:
        >>> unsaved_of(nn.BatchNorm1d(2))
        {}
    """
    saved = model.state_dict()
    return {f"buffer/{name}": buffer for name, buffer in model.named_buffers() if name not in saved}


def layout_digest(variables: Sequence[Variable], num_servers: int) -> str:
    """Return a digest by which two tasks check that they have the same variables and the same partition.

    Example:
        >>> len(layout_digest([], 1))
        64
    """
    lines = [f"{one.kind} {one.name} {one.shape} {one.dtype} {one.strides} {one.saved}" for one in variables]
    return hashlib.sha256("\n".join([str(num_servers), *lines]).encode()).hexdigest()
