"""The formats of quantized models, and the interface of the module of a format.

A format is written without any pickled object: its tensors are a safetensors file, and the rest is YAML. Loading builds
the model from its node, quantizes it in the same way, and then copies the numbers of the file into the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Final, Protocol, cast

from torch import Tensor, nn

from trainkit.config.grammar import refusal
from trainkit.config.values import nearest
from trainkit.errors import MissingExtraError
from trainkit.exporting.trained import Inputs, quiet
from trainkit.quantizing.transposed import as_linear

FORMATS: Final[Mapping[str, str]] = {
    "int8_weight": "trainkit.quantizing.linear",
    "int8_dynamic": "trainkit.quantizing.linear",
    "int4_weight": "trainkit.quantizing.linear",
    "int8_static": "trainkit.quantizing.static",
}
"""Format, as given to `--to` -> its module."""
_TRANSPOSED: Final = "transposed"
"""Key of the description: modules that were `Conv1D` and are `nn.Linear` in the quantized model."""
Read = Callable[[str], Tensor]
"""Function that reads a tensor of a file by its name; KeyError if there is none."""


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A quantized model, in memory and for the file."""

    model: nn.Module
    """The model, in evaluation mode, on the CPU."""
    tensors: Mapping[str, Tensor]
    """Content of the file of weights: dense tensors, no two of which share memory."""
    layers: tuple[str, ...]
    """Names of the modules whose weights were quantized."""
    facts: Mapping[str, Any]
    """Further facts that loading needs; values of YAML."""


def quantize(model: nn.Module, to: str, calibration: Sequence[Inputs]) -> Quantized:
    """Replace the transposed linear layers of a model, in place, and quantize it; as `Format.quantize`."""
    replaced = as_linear(model)
    done = format_named(to).quantize(model, to, calibration)
    return replace(done, facts={**done.facts, **({_TRANSPOSED: replaced} if replaced else {})})


def restore(model: nn.Module, to: str, read: Read, facts: Mapping[str, Any]) -> nn.Module:
    """Return the quantized model of a file; as `Format.restore`."""
    form = format_named(to)
    as_linear(model, map(str, facts.get(_TRANSPOSED, ())))
    return form.restore(model, to, read, facts)


class Format(Protocol):
    """A module of formats."""

    def quantize(self, model: nn.Module, to: str, calibration: Sequence[Inputs]) -> Quantized:
        """Quantize a model.

        Args:
            model: in float32 and evaluation mode, on the CPU; it may be changed.
            to: the format.
            calibration: the inputs of each forward pass; empty if the format needs none.

        Raises:
            ConfigError: the format does not suit the model; the message contains the reason.
        """

    def restore(self, model: nn.Module, to: str, read: Read, facts: Mapping[str, Any]) -> nn.Module:
        """Return the quantized model of a file.

        Args:
            model: built from its node, in float32 and evaluation mode; its numbers do not matter.
            to: the format.
            read: reads a tensor of the file by its name.
            facts: `facts` and `layers` of the description; the file may have been changed by others.

        Raises:
            KeyError, TypeError, ValueError, RuntimeError: they are not those of this model.
        """


def needs_calibration(to: str) -> bool:
    """Return whether a format observes activations.

    Example:
        >>> needs_calibration("int8_static"), needs_calibration("int8_dynamic")
        (True, False)
    """
    return to == "int8_static"


def format_named(name: str) -> Format:
    """Import the module of a format, and torchao with it.

    Raises:
        ConfigError: there is no such format, or torchao is not installed, or not for this torch.
    """
    if name not in FORMATS:
        raise refusal(f"--to {name}", f"is not a format. {nearest(name, FORMATS)}")
    with quiet():
        try:
            import_module("torchao")
        except ImportError as error:  # absent, or made for another torch
            raise MissingExtraError(key=f"--to {name}", package="torchao", extra="quantize") from error
        return cast("Format", import_module(FORMATS[name]))
