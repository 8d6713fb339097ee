"""Refuse convolutions whose gradients torch may compute wrongly, before anything is trained.

In bfloat16 on CPUs with AVX-512, a kernel of oneDNN leaves parts of the gradient of a weight unwritten, or writes
beyond it, if padded images are smaller than the stride; in three dims also if they are smaller than the kernel. The
gradient holds what the memory held before, and the process may crash. A transposed convolution uses the same kernel,
with its output as the images.

Found with torch 2.11 and 2.13: the gradients of 14,000 convolutions (kernels to 7, strides to 4, images to 14, dilated
and transposed ones, of one to three dims) were compared with those in float32, where freed memory was filled with large
numbers. Every wrong one meets the rule below; some that meet it are right, as other channels use another kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from trainkit.data.reading.collate import to_device
from trainkit.errors import Problem
from trainkit.numerics.copies import copied
from trainkit.numerics.generators import Untouched
from trainkit.run.planning.build import build_objective
from trainkit.run.planning.plan import RunPlan

_SHOWN: Final = 3
"""Names of layers in the message."""
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
    convolutions = {name: one for name, one in model.named_modules() if isinstance(one, _Convolution)}
    suspects = {name: one for name, one in convolutions.items() if _is_suspect(one)}
    found = _faulty_calls(plan, model, suspects) if suspects else []
    if not found:
        return []
    names = ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
    rule = (
        f"may have a wrong gradient on this CPU in {names}: torch leaves parts of it unwritten where padded images are "
        "smaller than the stride, or volumes smaller than the kernel. Use precision=fp32, larger images, or fewer "
        "strides."
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
        padding > 0 and (size < stride or (len(images) > 2 and size < extent and _misses(place, extent, count, stride)))
        for place, (size, count, extent, stride, padding) in enumerate(dims)
    )


def _misses(place: int, extent: int, count: int, stride: int) -> bool:
    """Return whether a volume smaller than the kernel in this dim may be wrong; place 0 is the depth.

    Kernels of at most 3 elements are right at a single position, and along rows and columns at stride 1.
    """
    return extent > 3 or (count > 1 and (place == 0 or stride > 1))


def _faulty_calls(plan: RunPlan, model: nn.Module, suspects: Mapping[str, _Convolution]) -> list[str]:
    """Run the model without data; return the names of convolutions that a call gives too small images."""
    found: dict[str, None] = {}

    def judge(name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        images = next(iter((*args, *kwargs.values())), None)
        if isinstance(images, Tensor) and isinstance(output, Tensor):
            of = suspects[name]
            taken, given = (tensor.shape[-len(of.kernel_size) :] for tensor in (images, output))
            if _is_faulty(of, given, taken) if of.transposed else _is_faulty(of, taken, given):
                found[name] = None

    with suppress(Exception), Untouched(seed=0):  # a training reports what fails
        sample, objective = plan.components.sample, build_objective(plan.cfg)  # the pass may change its state
        batch = to_device(plan.components.hooks.collate_function([sample, sample], [0, 1]), _META)
        without_data = copied(model).to(_META)
        for name in suspects:
            without_data.get_submodule(name).register_forward_hook(partial(judge, name), with_kwargs=True)
        objective.loss(without_data, batch)
    return list(found)
