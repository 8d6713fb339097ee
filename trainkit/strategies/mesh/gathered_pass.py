"""The tensors that FSDP2 allocates in a forward and backward pass, on a model without data.

Each rank gathers the parameters of a module into a flat tensor, copies them out into one tensor per parameter, and
copies the gradients into a flat buffer, reduce-scatters it and keeps its shard. The order of the allocations is that of
torch 2.13, `torch.distributed.fsdp._fully_shard` (`_fsdp_param_group.py`, `_fsdp_collectives.py`), and of
`ProcessGroupGloo.cpp`, which copies all gathered and summed tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten

from trainkit.numerics.precision import Precision
from trainkit.strategies.memory import RankPass


@dataclass(frozen=True, kw_only=True)
class Gathering:
    """Settings of the gathers of parameters and the sums of gradients."""

    num_ranks: int
    """Number of ranks over which a parameter is sharded."""
    precision: Precision
    by_gloo: bool
    """Whether the backend is gloo, that of ranks on the CPU."""
    reshard_after_forward: bool = True
    """Whether a module reshards after forward; the root module and the last one stay unsharded."""
    sums_each: bool = True
    """Whether gradients are summed after each shard, or only after the last one; then they are unsharded until that."""


@dataclass(kw_only=True)
class _Buffers:
    """Flat tensors that outlive the work of a module."""

    gathered: Tensor | None = None
    """Flat buffer of the last all-gather in forward; the next all-gather frees it."""
    summed: Tensor | None = None
    """Flat buffer of the last reduce-scatter; freed before the next one."""
    order: list[_Group] = field(default_factory=list)
    """The groups, in the order in which their forward passes ended."""


def _memory(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


class _Group:
    """The parameters of a module that are gathered together."""

    def __init__(self, params: Sequence[nn.Parameter], how: Gathering, buffers: _Buffers) -> None:
        self._params, self._how, self._buffers = params, how, buffers
        self._sizes = [_padded(param, how.num_ranks) * param.element_size() for param in params]
        self._flat: Tensor | None = None
        self._whole: list[Tensor] = []
        self._earlier: list[Tensor] = []
        self._turns: list[int] = []
        self.in_backward = self.ended = False
        self.is_kept = not how.reshard_after_forward
        """Whether the parameters of this group stay unsharded until backward."""
        self.next: _Group | None = None
        """The group that this group prefetches in forward."""
        self.adds = False
        """Whether a part of the summed gradients of an earlier shard exists."""
        self.part: Tensor | None = None
        """The part of the summed gradients that this rank keeps."""

    def keep_whole_gradients(self) -> None:
        """Allocate whole gradients of an earlier shard, in the masters' dtype."""
        trained = [param for param in self._params if param.requires_grad]
        if self._how.precision.model_dtype is self._how.precision.master_dtype:
            for param in trained:
                param.grad = torch.empty_like(param)
        else:
            dtype = self._how.precision.master_dtype
            self._earlier = [torch.empty_like(param, dtype=dtype) for param in trained]

    def begin_forward(self) -> None:
        """Gather the parameters."""
        self._begin_gather()
        self._end_gather(in_forward=True)
        if self.next is not None:
            self.next._begin_gather()  # noqa: SLF001 - of its own class

    def end_forward(self) -> None:
        """Free the gathered parameters, unless they are kept for backward."""
        if not self.is_kept:
            self._whole = []
        self._turns.append(len(self._buffers.order))
        self._buffers.order.append(self)

    def begin_backward(self, *_: object) -> None:
        """Gather the parameters, and begin to gather those of the previous module."""
        if self.in_backward:
            return
        self.in_backward = True
        self._begin_gather()
        self._end_gather(in_forward=False)
        turn = self._turns.pop() if self._turns else 0
        if turn > 1 and self._buffers.order[turn - 1].is_kept and not self._how.by_gloo:
            turn -= 1
        if turn:
            self._buffers.order[turn - 1]._begin_gather()  # noqa: SLF001 - of its own class

    def recompute(self) -> None:
        """Gather the parameters for a recomputation, unless they are unsharded."""
        self._begin_gather()
        self._end_gather(in_forward=False)

    def end_backward(self) -> None:
        """Free the gathered parameters, and sum the gradients over the ranks."""
        self.ended = True
        grads = self._take_gradients()
        self._whole = []
        self._buffers.summed = None
        if not grads:
            return
        width, ranks = self._how.precision.master_dtype.itemsize, self._how.num_ranks
        size = sum(_padded(grad, ranks) for grad in grads) * width
        self._buffers.summed = _memory(size)
        grads.clear()  # once they are copied
        part = _memory(size // ranks)
        if self._how.by_gloo:
            _memory(size)  # gloo sums a copy
        if not self.adds:
            self.part = part

    def _take_gradients(self) -> list[Tensor]:
        grads = [param.grad for param in self._params if param.grad is not None]
        for param in self._params:
            param.grad = None
        if self._earlier:
            grads, self._earlier = self._earlier, []
        return grads

    def _begin_gather(self) -> None:
        if self._whole or self._flat is not None:
            return
        size, cast = sum(self._sizes), self._how.precision
        copies = [] if cast.model_dtype is cast.master_dtype else [_memory(size // self._how.num_ranks)]
        self._flat = _memory(size)
        if self._how.by_gloo:
            copies.append(_memory(size))
        copies.clear()

    def _end_gather(self, *, in_forward: bool) -> None:
        if self._flat is None:
            return
        if in_forward:
            self._buffers.gathered = None
        self._whole = [_memory(size) for size in self._sizes]
        if in_forward:
            self._buffers.gathered = self._flat
        self._flat = None


def _padded(tensor: Tensor, ranks: int) -> int:
    rows = tensor.shape[0] if tensor.dim() else 1
    return -(-rows // ranks) * ranks * (tensor.numel() // max(rows, 1))


class GatheredPass(RankPass):
    """The pass of a rank with a part of each parameter.

    Args:
        units: function that returns the separately gathered modules of a model, inner ones first; the rest is one more.
        how: the settings.
    """

    sums_in_master_dtype = True

    def __init__(self, units: Callable[[nn.Module], Sequence[nn.Module]], how: Gathering) -> None:
        self._units, self._how, self._buffers = units, how, _Buffers()
        self._groups: dict[nn.Module, _Group] = {}

    def prepare(self, model: nn.Module) -> None:
        """Register hooks by which each unit gathers its parameters when it computes."""
        taken, found = set[int](), dict[nn.Module, _Group]()
        for module in [*self._units(model), model]:
            params = [param for param in module.parameters() if id(param) not in taken]
            taken.update(map(id, params))
            if params:
                found[module] = _Group(params, self._how, self._buffers)
        self._groups = {module: found[module] for module in model.modules() if module in found}
        self._link([group for module, group in self._groups.items() if module is not model], found.get(model))
        for module, group in found.items():
            _follow(module, group)
        model.register_forward_hook(self._after_forward)

    def _link(self, groups: Sequence[_Group], root: _Group | None) -> None:
        """Keep the model and its last module unsharded, and, with streams, let each group prefetch the next."""
        for one in (root, *groups[-1:]):
            if one is not None:
                one.is_kept = True
        if self._how.reshard_after_forward and not self._how.by_gloo:
            for one, after in pairwise([root, *groups] if root is not None else groups):
                one.next = after

    def _after_forward(self, *_: object) -> None:
        self._buffers.gathered = None

    def keep_gradients(self, model: nn.Module) -> Sequence[Tensor]:  # noqa: ARG002 - the groups hold them
        """Give groups the gradients of an earlier shard: shards, which the plan counts, or unsharded ones."""
        for group in self._groups.values():
            if self._how.sums_each:
                group.adds = True
            else:
                group.keep_whole_gradients()
        return ()

    def gradients(self, model: nn.Module) -> Sequence[Tensor]:  # noqa: ARG002 - the groups hold them
        """Sum the gradients of modules whose inputs need none, at the end of backward; return this rank's parts."""
        for group in self._groups.values():
            if not group.ended:
                group.end_backward()
        self._buffers.summed = None
        return [group.part for group in self._groups.values() if group.part is not None]


def _follow(module: nn.Module, group: _Group) -> None:
    """Call a group before and after forward and backward of its module."""

    def before(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        if group.in_backward:
            group.recompute()
            return None
        group.begin_forward()
        leaves, spec = tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not places or not torch.is_grad_enabled():
            return None
        for place, leaf in zip(places, _After.apply(group, *[leaves[place] for place in places]), strict=True):  # type: ignore[no-untyped-call]
            leaves[place] = leaf
        return tree_unflatten(leaves, spec)

    def after(_module: nn.Module, _args: Any, outputs: Any) -> None:
        if group.in_backward:
            return
        group.end_forward()
        for leaf in tree_iter(outputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(group.begin_backward)  # type: ignore[no-untyped-call]

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


class _After(torch.autograd.Function):
    """Ends the backward pass of a module once the gradients of its inputs are known."""

    @staticmethod
    def forward(ctx: Any, group: _Group, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs."""
        ctx.group = group
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs."""
        ctx.group.end_backward()
        return None, *grads
