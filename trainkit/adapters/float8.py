"""Compute the matrix products of linear layers in eight bits: torchao's float8 training."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Annotated, Final, Literal

import torch
from torch import nn

from trainkit.errors import Problem
from trainkit.extras import install_command
from trainkit.fields import maths

MULTIPLE: Final = 16
"""Both dims of a converted layer must be multiples of this: float8 matrix units of a GPU accept no others."""


@dataclass(frozen=True, kw_only=True)
class Float8:
    """Linear layers whose three matrix products take float8 inputs; parameters and results keep their dtypes.

    Each product scales its inputs by their largest absolute value, casts them to float8 (e4m3; e5m2 for gradients of
    `tensorwise`), multiplies, and divides by the scales. Parameters, gradients, optimizer and checkpoints are those of
    the plain layers; the numbers differ by design.

    Source: Micikevicius et al. 2022, arXiv:2209.05433; torchao, `torchao.float8`.

    Example:
        >>> model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10), nn.Linear(16, 16))
        >>> Float8().layers(model, output="3"), Float8(exclude=["0"]).layers(model, output="3")
        (['0'], ['3'])
    """

    recipe: Annotated[Literal["tensorwise", "rowwise"], maths] = "tensorwise"
    """Granularity of the scales: one for a tensor (fastest), or one for each row (rounds outliers separately)."""
    exclude: Annotated[Sequence[str] | Literal["auto"], maths] = "auto"
    """Globs on names of layers that are not converted; `auto`: the output layer."""
    emulate: Annotated[bool, maths] = False
    """Compute the rounded products in the wider dtype, on any device; slower than without float8, to try the numbers.
    """

    def layers(self, model: nn.Module, *, output: str | None) -> list[str]:
        """Return the names of the layers to convert: linear ones with dims of multiples of 16 that are not excluded.

        Args:
            model: the model, possibly without data.
            output: name of the output layer; None: the model has none.
        """
        excluded = ([] if output is None else [output]) if self.exclude == "auto" else self.exclude
        return [
            name
            for name, module in model.named_modules()
            if type(module) is nn.Linear
            and not (module.in_features % MULTIPLE or module.out_features % MULTIPLE)
            and not any(fnmatchcase(name, pattern) for pattern in excluded)
        ]

    def problems(
        self, model: nn.Module, *, output: str | None, devices: Iterable[str], precision: str
    ) -> list[Problem]:
        """Return the problems of converting a model; pure.

        Args:
            model: the model, possibly without data.
            output: name of the output layer; None: the model has none.
            devices: the devices of the tasks, such as `cuda:0`.
            precision: value of the precision.
        """
        if find_spec("torchao") is None:
            rule = f"needs torchao: {install_command('quantize', 'torchao')}"
            return [Problem(key="convert", value="float8", rule=rule)]
        rules = []
        if precision not in ("bf16", "bf16_mixed"):
            rule = "has no use for float8, whose results are bfloat16. Use bf16_mixed or bf16 with convert=float8."
            rules.append(("precision", precision, rule))
        if not self.emulate and (lacking := next(filter(None, map(_unsupported, devices)), None)):
            rule = (
                f"{lacking} has no units for float8, which GPUs have from compute capability 8.9 on (L4, RTX 4090, "
                "H100). Use convert=none, or convert.emulate=true to try the numbers."
            )
            rules.append(("convert", "float8", rule))
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        rule = f"matches no linear layer. There are: {', '.join(linear) or 'none'}."
        patterns = () if self.exclude == "auto" else self.exclude
        rules += [("convert.exclude", glob, rule) for glob in patterns if not any(fnmatchcase(n, glob) for n in linear)]
        if not self.layers(model, output=output):
            rule = (
                f"converts no layer: the model has no linear layer whose dims are multiples of {MULTIPLE}, besides "
                "those of convert.exclude. Use convert=none."
            )
            rules.append(("convert", "float8", rule))
        return [Problem(key=key, value=value, rule=rule) for key, value, rule in rules]

    def convert(self, model: nn.Module, *, output: str | None) -> nn.Module:
        """Replace layers in place; parameters and names stay.

        Args:
            model: on any device, or without data.
            output: name of the output layer; None: the model has none.

        Returns:
            The model itself.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchao warns about libraries that it does not need here
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: PLC0415 - optional

        names = frozenset(self.layers(model, output=output))
        recipe = Float8LinearConfig.from_recipe_name(self.recipe)
        # the gradient of a weight is a product over the rows of a shard, which are any number
        settings = replace(recipe, emulate=self.emulate, pad_inner_dim=not self.emulate)
        convert_to_float8_training(model, config=settings, module_filter_fn=lambda _, name: name in names)
        return model


def _unsupported(device: str) -> str | None:
    """Return the name of a device that has no units for float8; None if it has them or is not on this host."""
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return f"the {kind.upper()}"
    index = int(number or 0)
    if index >= torch.cuda.device_count() or torch.cuda.get_device_capability(index) >= (8, 9):
        return None
    return torch.cuda.get_device_name(index)
