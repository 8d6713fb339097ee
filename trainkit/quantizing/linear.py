"""Linear layers with weights in 8 or 4 bits, by `torchao.quantization.quantize_`.

A quantized weight is a tensor subclass of torchao. The file holds its dense tensors, `NAME.qdata`, `NAME.scale` and
others; two weights of 4 bits share a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    quantize_,
)
from torchao.quantization.granularity import PerGroup

from trainkit.config.grammar import refusal
from trainkit.exporting.trained import Inputs, quiet
from trainkit.quantizing.formats import Quantized, Read
from trainkit.trainer.checkpoint.saving import untied

_GROUP: Final = 32
"""Weights of 4 bits that share a scale, along the inputs of a layer."""
_INT4: Final[torch.dtype] = torch.int4  # type: ignore[attr-defined]  # the stubs of torch lack it
_CONFIGS: Final[Mapping[str, Callable[[], Any]]] = {
    "int8_weight": Int8WeightOnlyConfig,
    "int8_dynamic": Int8DynamicActivationInt8WeightConfig,
    "int4_weight": lambda: IntxWeightOnlyConfig(weight_dtype=_INT4, granularity=PerGroup(_GROUP)),
}


def quantize(model: nn.Module, to: str, calibration: Sequence[Inputs]) -> Quantized:
    """Quantize the weights of linear layers; those of int4_weight need a multiple of 32 inputs."""
    del calibration
    linear = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    layers = tuple(name for name in linear if to != "int4_weight" or _linear(model, name).in_features % _GROUP == 0)
    if not layers:
        why = f"has none whose inputs are a multiple of {_GROUP}" if linear else "has none"
        raise refusal(f"--to {to}", f"quantizes linear layers, and the model {why}.{'' if linear else _STATIC}")
    _quantize(model, to, layers)
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if _is_quantized(tensor):
            tensors |= {f"{name}.{part}": value for part, value in _parts(tensor, to).items()}
        else:
            tensors[name] = tensor.detach().contiguous()
    unique, tied = untied(tensors)
    return Quantized(model=model, tensors=unique, layers=layers, facts={"tied": dict(tied)})


_STATIC: Final = " int8_static quantizes convolutions too."


def restore(model: nn.Module, to: str, read: Read, facts: Mapping[str, Any]) -> nn.Module:
    """Quantize the same layers of a model, and copy the numbers of the file into them."""
    tied = facts["tied"]
    _quantize(model, to, [str(name) for name in facts["layers"]])
    for name, tensor in model.state_dict(keep_vars=True).items():
        if _is_quantized(tensor):
            parts = _unpacked(tensor, to, {part: read(f"{name}.{part}") for part in _part_names(tensor)})
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, nn.Parameter(_rebuilt(tensor, parts), requires_grad=False))
        else:
            with torch.no_grad():
                tensor.copy_(_same_shape(name, read(tied.get(name, name)), tensor))
    return model


def _quantize(model: nn.Module, to: str, layers: Sequence[str]) -> None:
    """Quantize linear layers of a model, after untying their weights."""
    for name in layers:
        _linear(model, name)
    with quiet():
        quantize_(model, _CONFIGS[to](), filter_fn=lambda _module, name: name in layers)


def _linear(model: nn.Module, name: str) -> nn.Linear:
    module = model.get_submodule(name)
    if not isinstance(module, nn.Linear):
        raise TypeError(f"{name} is not a linear layer")
    return module


def _is_quantized(tensor: Tensor) -> bool:
    return hasattr(tensor, "__tensor_flatten__")


def _part_names(tensor: Any) -> list[str]:
    names, _ = tensor.__tensor_flatten__()
    return list(names)


def _parts(tensor: Tensor, to: str) -> dict[str, Tensor]:
    """Return the dense tensors of a quantized one, by name."""
    parts = {name: getattr(tensor, name).detach().contiguous() for name in _part_names(tensor)}
    return {**parts, "qdata": packed(parts["qdata"])} if to == "int4_weight" else parts


def _unpacked(tensor: Tensor, to: str, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    dense = {**parts, "qdata": unpacked(parts["qdata"])} if to == "int4_weight" else parts
    return {name: _same_shape(name, value, getattr(tensor, name)) for name, value in dense.items()}


def _same_shape(name: str, value: Tensor, wanted: Tensor) -> Tensor:
    if value.shape != wanted.shape or value.dtype != wanted.dtype:
        found = f"{value.dtype} {tuple(value.shape)}"
        raise ValueError(f"{name} is {found}, not {wanted.dtype} {tuple(wanted.shape)}")
    return value


def _rebuilt(like: Any, parts: Mapping[str, Tensor]) -> Tensor:
    """Return a tensor of the same class as another one, with new numbers."""
    _, context = like.__tensor_flatten__()
    made: Tensor = type(like).__tensor_unflatten__(dict(parts), context, like.size(), like.stride())
    return made


def packed(values: Tensor) -> Tensor:
    """Put two whole numbers of [-8, 7] into a byte, int8 (..., 2 n) to uint8 (..., n).

    Example:
        >>> packed(torch.tensor([-8, 7], dtype=torch.int8)).tolist()
        [240]
    """
    raised = (values + 8).to(torch.uint8)
    return raised[..., ::2] | raised[..., 1::2] << 4


def unpacked(values: Tensor) -> Tensor:
    """Undo `packed`.

    Example:
        >>> unpacked(torch.tensor([240], dtype=torch.uint8)).tolist()
        [-8, 7]
    """
    pairs = torch.stack((values & 15, values >> 4), -1)
    return pairs.flatten(-2).to(torch.int8) - 8
