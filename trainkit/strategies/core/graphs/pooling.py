"""Keep torch's own kernels of max pooling in graphs of a CPU.

The code that inductor makes for the backward pass of a max pool takes several times as long as torch's kernel on a CPU,
where the channels lie last, and where one graph holds the forward and the backward pass. A compiler does not look into
an operator of a library: torch's kernels run inside of it.
"""

from __future__ import annotations

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


@torch.library.custom_op("trainkit::max_pool2d", mutates_args=(), device_types="cpu", tags=(torch.Tag.flexible_layout,))
def _max_pool2d(  # noqa: PLR0917 - as torch calls an operator
    inputs: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil_mode: bool
) -> tuple[Tensor, Tensor]:
    """Return the maxima and their indices, in the memory format of the inputs."""
    settings = (kernel, stride, padding, dilation, ceil_mode)
    if not inputs.is_contiguous() or inputs.shape[1] < _LEAST_CHANNELS:
        found: tuple[Tensor, Tensor] = torch.ops.aten.max_pool2d_with_indices(inputs, *settings)
        return found
    last = inputs.contiguous(memory_format=torch.channels_last)
    outputs, places = torch.ops.aten.max_pool2d_with_indices(last, *settings)
    return outputs.contiguous(), places.contiguous()


@torch.library.custom_op(
    "trainkit::max_pool2d_backward", mutates_args=(), device_types="cpu", tags=(torch.Tag.flexible_layout,)
)
def _max_pool2d_backward(  # noqa: PLR0917 - as above
    grads: Tensor,
    inputs: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
    places: Tensor,
) -> Tensor:
    """Return the gradients of the inputs."""
    found: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(
        grads, inputs, kernel, stride, padding, dilation, ceil_mode, places
    )
    return found


@_max_pool2d.register_fake
def _(inputs: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = torch.ops.aten.max_pool2d_with_indices(inputs, *settings)
    return found


@_max_pool2d_backward.register_fake
def _(_grads: Tensor, inputs: Tensor, *_settings: Any) -> Tensor:
    return torch.empty_like(inputs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1])
    ctx.settings = inputs[1:]


def _backward(ctx: Any, grads: Tensor, _places: Tensor) -> tuple[Tensor | None, ...]:
    inputs, places = ctx.saved_tensors
    return _max_pool2d_backward(grads, inputs, *ctx.settings, places), None, None, None, None, None


_max_pool2d.register_autograd(_backward, setup_context=_save)


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
                both = graph.graph.call_function(torch.ops.trainkit.max_pool2d.default, (node.args[0], *settings))
                first = graph.graph.call_function(getitem, (both, 0))
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
