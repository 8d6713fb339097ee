"""Memory layouts: every tensor that belongs to a parameter has the parameter's own strides.

Fused kernels and flat exchanges walk memory linearly: for two tensors with different strides they would combine
different elements. A parameter whose elements are contiguous in memory in any order of its dims (contiguous,
channels_last, transposed) is *dense*, and gradients, optimizer slots and copies of it use its strides. `make_dense`
copies all others. A `FlatBuffer` lays all tensors of a step's exchange into one vector. A `Placement` says on which
device each tensor lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainkit.errors import ConfigError, Problem
from trainkit.numerics.generators import hash64

Strides = tuple[int, ...] | None
"""Strides of a dense tensor; None: those of a contiguous one."""


def dense_strides(tensor: Tensor) -> Strides:
    """Return the strides of a dense tensor, or the strides that `make_dense` would give it; None if it is contiguous.

    Example:
        >>> dense_strides(torch.ones(3, 2).t()), dense_strides(torch.ones(3, 4)[:, :2])
        ((1, 2), None)
    """
    strides, row = tensor.stride(), 1
    for size, stride in zip(reversed(tensor.shape), reversed(strides), strict=True):
        if stride != row:
            break
        row *= max(size, 1)
    else:
        return None
    preserved = torch.empty_like(tensor, device="meta").stride()  # the dims stay in the order of the memory
    return None if preserved == torch.empty(tensor.shape, device="meta").stride() else preserved


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor on this rank, as a view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_strides(shape: Sequence[int], whole: Strides) -> Strides:
    """Return the strides of a dense part of a tensor whose dims have the memory order of the whole tensor.

    Example:
        >>> part_strides((2, 5), (1, 4)), part_strides((2, 5), None)
        ((1, 2), None)
    """
    return None if whole is None else dense_strides(torch.empty_strided(shape, whole, device="meta"))


def view_of(flat: Tensor, shape: Sequence[int], strides: Strides) -> Tensor:
    """View a contiguous range of memory, (numel,), as a dense tensor; no copy."""
    return flat.view(shape) if strides is None else flat.as_strided(shape, strides)


def row_dtype(num_rows: int) -> torch.dtype:
    """Return the dtype of the row indices of a sparse gradient that are sent.

    Example:
        >>> row_dtype(2**31 - 1), row_dtype(2**31)
        (torch.int32, torch.int64)
    """
    return torch.int32 if num_rows < 2**31 else torch.int64


def layout_mark(tensor: Tensor) -> int:
    """Return a number of 63 bits that identifies the order of a dense tensor's dims in memory; 0: contiguous.

    Example:
        >>> layout_mark(torch.ones(3, 2)), layout_mark(torch.ones(2, 3).t()) > 0
        (0, True)
    """
    strides = dense_strides(tensor)
    return 0 if strides is None else hash64(*strides) >> 1


def in_memory_order(tensor: Tensor) -> Tensor:
    """View a dense tensor with its dims in the order of its memory, which makes it contiguous; no copy.

    Example:
        >>> in_memory_order(torch.ones(3, 2).t()).shape
        torch.Size([3, 2])
    """
    if tensor.is_contiguous():
        return tensor
    strides = tensor.stride()
    return tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))


def in_layout(tensor: Tensor, strides: Strides) -> Tensor:
    """Return a tensor with given strides: the tensor itself if it has them, else a view or a copy.

    Example:
        >>> in_layout(torch.ones(2, 3), (1, 2)).stride()
        (1, 2)
    """
    if strides is None:
        return tensor.contiguous()
    if tensor.stride() == strides:
        return tensor
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
    if all(actual == expected for size, actual, expected in pairs if size > 1):
        return tensor.as_strided(tensor.shape, strides)  # a dim of one element may have any stride
    copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


@torch.no_grad()
def replace_tensors(model: nn.Module, new: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter and buffer of a model, in the order of its modules.

    Unlike after `to_empty`, tied parameters stay tied.

    Args:
        model: the model.
        new: returns the tensor to take the place of another: the same one to keep it.
    """
    by_id: dict[int, Tensor] = {}
    for owner in model.modules():
        params = owner.named_parameters(recurse=False, remove_duplicate=False)
        for name, tensor in [*params, *owner.named_buffers(recurse=False, remove_duplicate=False)]:
            if id(tensor) not in by_id:
                result = new(tensor)
                replaces = isinstance(tensor, nn.Parameter) and result is not tensor
                by_id[id(tensor)] = nn.Parameter(result, requires_grad=tensor.requires_grad) if replaces else result
            if by_id[id(tensor)] is not tensor:
                setattr(owner, name, by_id[id(tensor)])  # recurrent layers also keep their parameters in a list


def make_dense(model: nn.Module) -> None:
    """Copy the parameters and buffers of a model that are not dense; others do not change.

    Torch itself gives the gradient of such a parameter other strides than the optimizer's slots, and its fused kernels
    write over elements that do not belong to the parameter.

    Raises:
        ConfigError: a trainable parameter cannot be updated at all (`layout_problems`).
    """
    if problems := layout_problems(model):
        raise ConfigError(problems)
    for param in model.parameters():
        if not _is_dense(param):
            param.data = torch.empty_like(param.data).copy_(param.data)
    for module in model.modules():
        for name, buffer in module._buffers.items():  # noqa: SLF001 - buffers are replaced by new tensors
            if buffer is not None and buffer.layout is torch.strided and not _is_dense(buffer):
                module._buffers[name] = torch.empty_like(buffer).copy_(buffer)  # noqa: SLF001


def layout_problems(model: nn.Module) -> list[Problem]:
    """Return a problem for each trainable parameter whose elements share memory, which no optimizer can update."""
    return [
        Problem(key="model", rule=f"{name} is an expanded tensor, whose elements share memory: {_REMEDY}")
        for name, param in model.named_parameters()
        if param.requires_grad and _overlaps(param)
    ]


_REMEDY = "torch cannot update them separately. Make it a tensor of its own, nn.Parameter(tensor.clone())."


def _is_dense(tensor: Tensor) -> bool:
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _overlaps(tensor: Tensor) -> bool:
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach += (size - 1) * stride
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlaces:
    """The places of tensors that several devices of a replica hold."""

    places: tuple[int, ...]
    """The place of each tensor, the same in every replica."""
    devices: tuple[torch.device, ...]
    """The device of each place in this replica; two places may be on one device."""

    def and_more(self, count: int) -> TensorPlaces:
        """Return the places of these tensors and of `count` more at the place of the last one."""
        last = self.places[-1] if self.places else 0
        return TensorPlaces(places=(*self.places, *[last] * count), devices=self.devices)


class Placement:
    """The devices of a replica, and the device of each tensor; by default all are on one device."""

    device: torch.device
    """The device of the batches and the loss."""

    @property
    def devices(self) -> Sequence[torch.device]:
        """All devices."""
        return (self.device,)

    def device_of(self, name: str) -> torch.device:  # noqa: ARG002 - the same for each
        """Return the device of a parameter, by canonical name."""
        return self.device

    def places_of(self, names: Sequence[str]) -> TensorPlaces | None:  # noqa: ARG002
        """Return the places of parameters and buffers; None if all are on one device."""
        return None

    def move(self, model: nn.Module) -> nn.Module:
        """Move every tensor of the model to its device."""
        return model.to(device=self.device)


@dataclass(frozen=True, kw_only=True)
class SingleDevicePlacement(Placement):
    """The whole model on one device.

    Example:
        >>> SingleDevicePlacement(device=torch.device("cpu")).device_of("any.weight")
        device(type='cpu')
    """

    device: torch.device


class FlatBuffer:
    """The layout of tensors in a flat vector.

    Args:
        num_grads: number of gradients among the tensors, which come first; None: all.
        strides: the strides of each tensor's view, dense; None: all are contiguous.
        places: where the tensors are, if several devices hold them: `parts` then has a vector for each place.

    Example:
        >>> packing = FlatBuffer([torch.Size([2]), torch.Size([])], torch.float32, torch.device("cpu"))
        >>> packing.pack([torch.ones(2), None]).tolist()
        [1.0, 1.0, 0.0]
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        dtype: torch.dtype,
        device: torch.device,
        *,
        num_grads: int | None = None,
        strides: Sequence[Strides] | None = None,
        places: TensorPlaces | None = None,
    ) -> None:
        self.shapes = list(shapes)
        self.strides = [None] * len(self.shapes) if strides is None else list(strides)
        self.sizes = [shape.numel() for shape in shapes]
        self.offsets = [0, *accumulate(self.sizes)]
        self.dtype, self.device = dtype, device
        self.num_grads = len(self.shapes) if num_grads is None else num_grads
        self.places = places

    @classmethod
    def like(cls, tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> FlatBuffer:
        """Return the layout for tensors of these shapes and strides."""
        return cls([tensor.shape for tensor in tensors], dtype, device, strides=list(map(dense_strides, tensors)))

    @cached_property
    def parts(self) -> tuple[FlatPart, ...]:
        """The tensors of each place, with a vector on its device; one part if the tensors have no places."""
        if self.places is None:
            return (FlatPart(indices=tuple(range(len(self.shapes))), packing=self),)
        parts = []
        for place in sorted(set(self.places.places)):
            indices = tuple(index for index, value in enumerate(self.places.places) if value == place)
            packing = FlatBuffer(
                [self.shapes[index] for index in indices],
                self.dtype,
                self.places.devices[place],
                num_grads=sum(index < self.num_grads for index in indices),
                strides=[self.strides[index] for index in indices],
            )
            parts.append(FlatPart(indices=indices, packing=packing))
        return tuple(parts)

    @property
    def numel(self) -> int:
        """Elements of the vector."""
        return self.offsets[-1]

    def on(self, device: torch.device) -> FlatBuffer:
        """Return the same layout on another device."""
        return FlatBuffer(self.shapes, self.dtype, device, num_grads=self.num_grads, strides=self.strides)

    def empty(self) -> Tensor:
        """Return a vector of zeros."""
        return torch.zeros(self.numel, dtype=self.dtype, device=self.device)

    def pack(self, tensors: Sequence[Tensor | None], into: Tensor | None = None) -> Tensor:
        """Copy tensors into a vector; None leaves zeros."""
        flat = self.empty() if into is None else into
        self.fill(self.views(flat), tensors)
        return flat

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the tensors inside a vector, each with the strides of its parameter, without a copy."""
        places = zip(self.offsets, self.sizes, self.shapes, self.strides, strict=False)
        return [view_of(flat.narrow(0, start, size), shape, strides) for start, size, shape, strides in places]

    @staticmethod
    def fill(views: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> None:
        """Copy tensors into the views of a vector; None gives zeros."""
        absent = [view for view, tensor in zip(views, tensors, strict=True) if tensor is None]
        if absent:
            torch._foreach_zero_(absent)
            views = [view for view, tensor in zip(views, tensors, strict=True) if tensor is not None]
            tensors = [tensor for tensor in tensors if tensor is not None]
        if tensors:
            torch._foreach_copy_(views, tensors)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class FlatPart:
    """The tensors of a flat buffer that share a vector on one device."""

    indices: tuple[int, ...]
    """Indices of the tensors in the whole buffer, ascending."""
    packing: FlatBuffer
    """Layout of these tensors."""

    def chosen(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the tensors of this part, out of those of the whole buffer."""
        return [tensors[index] for index in self.indices]


def unsplit(parts: Sequence[FlatPart], tensors: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """Return the tensors of all parts, given part by part, in the order of the whole buffer."""
    whole: list[Tensor | None] = [None] * sum(len(part.indices) for part in parts)
    for part, part_tensors in zip(parts, tensors, strict=True):
        for index, tensor in zip(part.indices, part_tensors, strict=True):
            whole[index] = tensor
    return whole


def find_sparse(grads: Sequence[Tensor | None]) -> dict[int, int]:
    """Return the indices of the sparse gradients -> their number of sparse dims (1 for an embedding).

    Example:
        >>> find_sparse([torch.ones(2), None, torch.ones(2, 3).to_sparse(1)])
        {2: 1}
    """
    sparse_dims = {index: grad.sparse_dim() for index, grad in enumerate(grads) if grad is not None and grad.is_sparse}
    checks = torch.sparse.check_sparse_tensor_invariants
    if sparse_dims and not checks.is_enabled():  # type: ignore[no-untyped-call]
        checks.disable()  # type: ignore[no-untyped-call] # explicit: torch and its optimizers warn otherwise
    return sparse_dims
