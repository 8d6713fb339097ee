"""Refuse convolutions whose gradients torch computes wrongly, before anything is trained.

In bfloat16 on CPUs with AVX-512, the kernel of oneDNN leaves parts of the gradient of a weight unwritten if an image of
a strided, padded convolution has fewer rows or columns than the stride: the gradient holds what the memory held before.
Found with torch 2.11 and 2.13: the gradients of all kernel sizes from 2 to 7, strides to 4 and images to 4 x 4 were
compared with those in float32, where freed memory was filled with large numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from trainkit.data.reading.collate import to_device
from trainkit.errors import Problem
from trainkit.numerics.generators import Untouched
from trainkit.run.planning.build import build_objective
from trainkit.run.planning.plan import RunPlan

_SHOWN: Final = 3
"""Names of layers in the message."""
_Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
_META: Final = torch.device("meta")


def convolution_problems(plan: RunPlan, model: nn.Module) -> list[Problem]:
    """Return the convolutions of a plan with a wrong gradient on this CPU; none that runs only with data is found.

    Args:
        plan: a run in bfloat16.
        model: the model, possibly without data; unchanged.
    """
    if all(task.device != "cpu" for task in plan.tasks) or not has_the_kernel():
        return []
    convolutions = {name: one for name, one in model.named_modules() if isinstance(one, _Convolution)}
    suspects = {name: one for name, one in convolutions.items() if _is_suspect(one)}
    found = list(_with_smaller_images(plan, model, suspects)) if suspects else []
    if not found:
        return []
    names = ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
    rule = (
        f"has a wrong gradient on this CPU in {names}: torch leaves parts of it unwritten where images are smaller "
        "than the stride. Use precision=fp32, larger images, or fewer strides."
    )
    return [Problem(key="precision", value=plan.components.precision.value, rule=rule)]


def has_the_kernel() -> bool:
    """Return whether torch uses the kernel on this machine."""
    has_library: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_library and "AVX512" in torch.backends.cpu.get_cpu_capability()


def _is_suspect(module: _Convolution) -> bool:
    if isinstance(module.padding, str) or not module.weight.requires_grad:
        return False
    return any(stride > 1 and padding > 0 for stride, padding in zip(module.stride, module.padding, strict=True))


def _with_smaller_images(plan: RunPlan, model: nn.Module, suspects: Mapping[str, _Convolution]) -> Iterator[str]:
    """Run the model without data; yield the names of convolutions whose images are smaller than their stride."""
    sizes: dict[str, tuple[int, ...]] = {}

    def note(name: str, _module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            sizes[name] = tuple(args[0].shape)

    with suppress(Exception), Untouched(seed=0):  # a training reports what fails
        sample, objective = plan.components.sample, build_objective(plan.cfg)  # the pass may change its state
        batch = to_device(plan.components.hooks.collate_function([sample, sample], [0, 1]), _META)
        without_data = copy.deepcopy(model).to(_META)
        for name in suspects:
            without_data.get_submodule(name).register_forward_pre_hook(partial(note, name))
        objective.loss(without_data, batch)
    for name, shape in sizes.items():
        of = suspects[name]
        images = shape[-len(of.stride) :]
        if any(size < step and pad != 0 for size, step, pad in zip(images, of.stride, of.padding, strict=True)):
            yield name
