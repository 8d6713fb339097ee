"""What oneDNN does with convolutions on the CPU: gradients that it may compute wrongly, and memory that it takes.

In bfloat16 on CPUs with AVX-512, a kernel of oneDNN leaves parts of the gradient of a weight unwritten, or writes
beyond it, if padded images are smaller than the stride; in three dims also if they are smaller than the kernel. The
gradient holds what the memory held before, and the process may crash. A transposed convolution uses the same kernel,
with its output as the images.

Found with torch 2.11 and 2.13: the gradients of 14,000 convolutions (kernels to 7, strides to 4, images to 14, dilated
and transposed ones, of one to three dims) were compared with those in float32, where freed memory was filled with large
numbers. Every wrong one meets the rule below; some that meet it are right, as other channels use another kernel.

Memory: it computes with weights in blocks of channels, and with images in blocks of channels or in channels_last:
tensors in another layout are copied. Counted with one thread; with more, the backward pass takes buffers for each.

Source: torch 2.13, aten/src/ATen/native/Convolution.cpp and mkldnn/Conv.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from trainkit.data.reading.collate import to_device
from trainkit.errors import Problem, listed
from trainkit.numerics.copies import copied
from trainkit.numerics.generators import Untouched
from trainkit.run.planning.plan import RunPlan
from trainkit.trained.build import build_objective

_Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
_META: Final = torch.device("meta")


def convolution_problems(plan: RunPlan, model: nn.Module) -> list[Problem]:
    """Return the convolutions of a plan that may have a wrong gradient on this CPU.

    A model that runs only with data is not checked.

    Args:
        plan: a run in bfloat16.
        model: the model, possibly without data; unchanged.
    """
    if all(task.device != "cpu" for task in plan.tasks) or not has_the_kernel():
        return []
    convolutions = {name: module for name, module in model.named_modules() if isinstance(module, _Convolution)}
    suspects = {name: module for name, module in convolutions.items() if _is_suspect(module)}
    names = _faulty_calls(plan, model, suspects) if suspects else []
    if not names:
        return []
    rule = (
        f"may have a wrong gradient on this CPU in {listed(names, 3)}: torch leaves parts of it unwritten where "
        "padded images are smaller than the stride, or volumes smaller than the kernel. Use precision=fp32, larger "
        "images, or fewer strides."
    )
    return [Problem(key="precision", value=plan.components.precision.value, rule=rule)]


def has_the_kernel() -> bool:
    """Return whether torch uses the kernel on this machine."""
    has_library: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_library and "AVX512" in torch.backends.cpu.get_cpu_capability()


def _is_suspect(module: _Convolution) -> bool:
    trains = any(param.requires_grad for param in module.parameters())
    return trains and any(_paddings(module)) and (len(module.kernel_size) > 2 or max(module.stride) > 1)


def _paddings(module: _Convolution) -> tuple[int, ...]:
    """Return the padding by the kernel itself, per dim; other values than zeros are padded before it is called."""
    if module.padding_mode != "zeros" or module.padding == "valid":
        return (0,) * len(module.kernel_size)
    if isinstance(module.padding, str):
        return tuple((extent - 1) // 2 for extent in _extents(module))
    return module.padding


def _extents(module: _Convolution) -> tuple[int, ...]:
    return tuple(step * (size - 1) + 1 for size, step in zip(module.kernel_size, module.dilation, strict=True))


def _is_faulty(module: _Convolution, images: Sequence[int], positions: Sequence[int]) -> bool:
    """Return whether the gradient may be wrong.

    Args:
        module: a convolution.
        images: sizes of its input, or of its output if it is transposed.
        positions: sizes of its output, or of its input if it is transposed.
    """
    dims = zip(images, positions, _extents(module), module.stride, _paddings(module), strict=True)
    return any(
        padding > 0 and (size < stride or (len(images) > 2 and size < extent and _misses(dim, extent, count, stride)))
        for dim, (size, count, extent, stride, padding) in enumerate(dims)
    )


def _misses(dim: int, extent: int, count: int, stride: int) -> bool:
    """Return whether a volume smaller than the kernel in this dim may be wrong; dim 0 is the depth.

    Kernels of at most 3 elements are right at a single position, and along rows and columns at stride 1.
    """
    return extent > 3 or (count > 1 and (dim == 0 or stride > 1))


def _faulty_calls(plan: RunPlan, model: nn.Module, suspects: Mapping[str, _Convolution]) -> list[str]:
    """Run the model without data; return the names of convolutions that a call gives too small images."""
    faulty: dict[str, None] = {}

    def judge(name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        images = next(iter((*args, *kwargs.values())), None)
        if isinstance(images, Tensor) and isinstance(output, Tensor):
            conv = suspects[name]
            inputs, outputs = (tensor.shape[-len(conv.kernel_size) :] for tensor in (images, output))
            if _is_faulty(conv, outputs, inputs) if conv.transposed else _is_faulty(conv, inputs, outputs):
                faulty[name] = None

    with suppress(Exception), Untouched(seed=0):  # a training reports what fails
        sample, objective = plan.components.sample, build_objective(plan.cfg)  # the pass may change its state
        batch = to_device(plan.components.hooks.collate_function([sample, sample], [0, 1]), _META)
        without_data = copied(model).to(_META)
        for name in suspects:
            without_data.get_submodule(name).register_forward_hook(partial(judge, name), with_kwargs=True)
        objective.loss(without_data, batch)
    return list(faulty)


_PLAIN_CHANNELS: Final = 3
"""Largest number of channels of images that oneDNN reads without a copy."""


def workspace_of(func: Callable[..., Any], args: tuple[Any, ...], outputs: Any) -> int:
    """Return the bytes that an operation takes while it runs, in addition to its outputs; 0 for all but convolutions.

    Args:
        func: the operation.
        args: its arguments, which may be without data.
        outputs: its outputs.

    Example:
        >>> images, weight = torch.zeros(2, 8, 4, 4), torch.zeros(16, 8, 3, 3)
        >>> args = (images, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        >>> workspace_of(torch.ops.aten.convolution.default, args, torch.zeros(2, 16, 4, 4))
        5632
    """
    compute = _CONVOLUTIONS.get(func)
    return 0 if compute is None else compute(args, outputs)


def _bytes_forward(args: tuple[Any, ...], output: Tensor) -> int:
    images, weight = args[:2]
    if _is_plain(images, weight, args[3:9]):
        return _columns(images, weight, output, args[3:9])
    size = _num_bytes(weight)
    if _is_channels_last(images, weight):
        return size + _copied(weight)  # the weights in channels_last, and these in blocks
    return max(_blocks(images) + size, _num_bytes(output))  # the images and the weights, and then the outputs in blocks


def _bytes_backward(args: tuple[Any, ...], outputs: tuple[Tensor | None, ...]) -> int:
    grads, images, weight = args[:3]
    if _is_plain(images, weight, args[4:10]):
        return _columns(images, weight, grads, args[4:10])
    for_images, for_weight = outputs[0] is not None, outputs[1] is not None
    size = _num_bytes(weight)
    if _is_channels_last(images, weight):
        return _copied(weight) + (2 * size if for_weight else size)
    of_grads, of_images, of_weight = _num_bytes(grads), for_images * _num_bytes(images), for_weight * size
    in_turn = [of_grads + size + of_images, 2 * of_images] if for_images else []
    if for_weight:
        in_turn += [of_images + of_grads + _blocks(images) + size, of_images + 2 * size]
    return max([*in_turn, of_images + of_weight]) - of_images - of_weight


def _is_plain(images: Tensor, weight: Tensor, settings: tuple[Any, ...]) -> bool:
    """Return whether torch's own kernel runs, and not oneDNN's."""
    backend = torch._C._select_conv_backend(images, weight, None, *settings)  # noqa: SLF001 - as torch's fake tensors do
    return "Mkldnn" not in str(backend)


def _columns(images: Tensor, weight: Tensor, outputs: Tensor, settings: tuple[Any, ...]) -> int:
    """Return the bytes of the patches of the images that torch's own kernel multiplies; images of 1 x 1 need no such
    copy.
    """
    stride, padding = settings[:2]
    if all(extent == 1 for extent in (*weight.shape[2:], *stride)) and not any(padding):
        return 0
    return outputs.numel() // max(outputs.shape[1], 1) * weight[0].numel() * images.element_size()


def _is_channels_last(*tensors: Tensor) -> bool:
    return any(tensor.is_contiguous(memory_format=_last(tensor)) and not tensor.is_contiguous() for tensor in tensors)


def _copied(weight: Tensor) -> int:
    """Return the bytes of weights if they are copied to channels_last."""
    return 0 if weight.is_contiguous(memory_format=_last(weight)) else _num_bytes(weight)


def _last(tensor: Tensor) -> torch.memory_format:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return formats.get(tensor.dim(), torch.contiguous_format)


def _blocks(images: Tensor) -> int:
    return _num_bytes(images) if images.shape[1] > _PLAIN_CHANNELS else 0


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


_CONVOLUTIONS: Final[Mapping[Any, Callable[..., int]]] = {
    torch.ops.aten.convolution.default: _bytes_forward,
    torch.ops.aten.convolution_backward.default: _bytes_backward,
}
