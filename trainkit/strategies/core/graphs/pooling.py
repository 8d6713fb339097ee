"""Keep torch's own kernels of max pooling in graphs of a CPU.

The code that inductor makes for the backward pass of a max pool takes several times as long as torch's kernel on a CPU,
where the channels lie last, and where one graph holds the forward and the backward pass. A compiler does not look into
an operator of a library: torch's kernels run inside of it. The compiler's cache on disk knows an operator by its name
alone: an operator that changes needs another name.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.nn import functional
from torch.nn.modules.utils import _pair

_POOLS: Final = (functional.max_pool2d, torch.max_pool2d)
_LEAST_ELEMENTS: Final = 1 << 18
"""Number of input elements below which a call of a library operator costs more than a slow kernel."""
_LEAST_CHANNELS: Final = 8
"""Number of channels from which the channels_last kernel is faster, including copies of input and output."""


@torch.library.custom_op(
    "trainkit::pool_maxima", mutates_args=(), device_types="cpu", tags=(torch.Tag.flexible_layout,)
)
def _pool_maxima(  # noqa: PLR0917 - as torch calls an operator
    inputs: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil_mode: bool
) -> tuple[Tensor, Tensor]:
    """Return the maxima and their indices, with the channels last if there are enough of them."""
    found: tuple[Tensor, Tensor] = torch.ops.aten.max_pool2d_with_indices(
        inputs.contiguous(memory_format=_format_of(inputs)), kernel, stride, padding, dilation, ceil_mode
    )
    return found


def _format_of(images: Tensor) -> torch.memory_format:
    """Return the memory format in which torch's kernels are faster, including a copy of its inputs."""
    last = images.shape[1] >= _LEAST_CHANNELS or not images.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


@torch.library.custom_op(
    "trainkit::grads_of_maxima",
    mutates_args=(),
    device_types="cpu",
    tags=(torch.Tag.needs_fixed_stride_order,),  # else a slow copy of `grads` inside of torch's kernel
)
def _grads_of_maxima(  # noqa: PLR0917 - as above
    grads: Tensor,
    places: Tensor,
    sizes: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
) -> Tensor:
    """Return the gradients of inputs of these sizes, in the memory format of the indices."""
    inputs = torch.empty(sizes, dtype=grads.dtype, memory_format=_format_of(places))  # torch reads its sizes alone
    found: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(
        grads, inputs, kernel, stride, padding, dilation, ceil_mode, places
    )
    return found


@_pool_maxima.register_fake
def _(inputs: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    outputs, places = torch.ops.aten.max_pool2d_with_indices(inputs, *settings)
    form = _format_of(inputs)
    return outputs.contiguous(memory_format=form), places.contiguous(memory_format=form)


@_grads_of_maxima.register_fake
def _(grads: Tensor, places: Tensor, sizes: Sequence[int], *_settings: Any) -> Tensor:
    return torch.empty(sizes, dtype=grads.dtype, device=grads.device, memory_format=_format_of(places))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.sizes, ctx.settings = inputs[0].shape, inputs[1:]


def _backward(ctx: Any, grads: Tensor, _places: Tensor) -> tuple[Tensor | None, ...]:
    (places,) = ctx.saved_tensors
    grads = grads.contiguous(memory_format=_format_of(places))
    return _grads_of_maxima(grads, places, ctx.sizes, *ctx.settings), None, None, None, None, None


_pool_maxima.register_autograd(_backward, setup_context=_save)


def keep_pool_kernels(graph: fx.GraphModule, *, is_joint: bool) -> None:
    """Replace the max pools of a graph for which torch's kernels are faster than compiled ones; the numbers do not
    change.

    Args:
        graph: traced by torch.compile, with example values.
        is_joint: whether the graph holds a backward pass.
    """
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target in _POOLS and _is_slow(node, is_joint=is_joint):
            settings = settings_of(*node.args[1:], **node.kwargs)
            with graph.graph.inserting_before(node):
                both = graph.graph.call_function(torch.ops.trainkit.pool_maxima.default, (node.args[0], *settings))
                first = graph.graph.call_function(getitem, (both, 0))
                if node.args[0].meta["example_value"].is_contiguous():  # the nodes that follow rely on it: views
                    first = graph.graph.call_method("contiguous", (first,))
            first.meta.update(node.meta)
            node.replace_all_uses_with(first)
            graph.graph.erase_node(node)
    graph.recompile()


def _is_slow(node: fx.Node, *, is_joint: bool) -> bool:
    value = node.args[0].meta.get("example_value") if node.args and isinstance(node.args[0], fx.Node) else None
    if not isinstance(value, Tensor) or value.dim() != 4 or value.device.type != "cpu":
        return False
    if node.kwargs.get("return_indices") or value.numel() < _LEAST_ELEMENTS:
        return False
    return is_joint or not value.is_contiguous()


def settings_of(
    kernel: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False, **_: Any
) -> tuple[list[int], list[int], list[int], list[int], bool]:
    """Return the arguments of a pool in the form of the operator; without a stride, it is the kernel size."""
    kernel = [*_pair(kernel)]
    return kernel, [*_pair(stride)] if stride else kernel, [*_pair(padding)], [*_pair(dilation)], ceil_mode
