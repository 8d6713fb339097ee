"""Precision as a value: the dtypes of parameters, compute and gradients, and the loss scaling of fp16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrizations import _Orthogonal, _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._pytree import tree_map

from trainkit.errors import LossScaleError
from trainkit.fields import OnlyWith, above, at_least, unit
from trainkit.numerics.loss_scaling import KEYS, SCALED

_NOTHING: Final = nullcontext()
_LARGEST: Final = 2.0**120
"""Largest loss scale, still a float32: where all gradients are zero nothing overflows, and the scale only grows."""

Value = Literal["fp64", "fp32", "tf32", "bf16", "bf16_mixed", "fp16_mixed"]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The number formats of a training.

    | value | parameters and optimizer | compute |
    |---|---|---|
    | fp64 | float64 | float64 |
    | fp32 | float32 | float32, matrix products in full precision |
    | tf32 | float32 | float32; on CUDA, matrix products with 10 bits of mantissa |
    | bf16 | float32 masters of bfloat16 parameters | bfloat16; batch normalisation has float32 parameters |
    | bf16_mixed | float32 | autocast: matrix products in bfloat16 |
    | fp16_mixed | float32 | autocast: matrix products in float16, with loss scaling |

    Source: Micikevicius et al. 2018, arXiv:1710.03740; Kalamkar et al. 2019, arXiv:1905.12322.
    """

    only_with: ClassVar[OnlyWith] = KEYS
    """The keys that only loss scaling reads."""

    value: Value = "fp32"
    """The name of the precision."""
    initial_scale: Annotated[float, above(0)] = 65536.0
    """fp16_mixed: the first loss scale."""
    growth_interval: Annotated[int, at_least(1), unit("steps")] = 2000
    """fp16_mixed: steps without overflow after which the scale doubles."""
    min_scale: Annotated[float, above(0)] = 1.0
    """fp16_mixed: the scale never falls below this."""
    max_overflows: Annotated[int, at_least(1), unit("overflows")] = 20
    """fp16_mixed: overflows in a row after which the run stops."""

    @cached_property
    def model_dtype(self) -> torch.dtype:
        """The dtype of the parameters in the forward pass."""
        return {"fp64": torch.float64, "bf16": torch.bfloat16}.get(self.value, torch.float32)

    @cached_property
    def master_dtype(self) -> torch.dtype:
        """The dtype of the parameters that the optimizer updates and a checkpoint stores."""
        return torch.float64 if self.value == "fp64" else torch.float32

    @cached_property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of matrix products."""
        mixed = {"bf16_mixed": torch.bfloat16, "fp16_mixed": torch.float16}
        return mixed.get(self.value, self.model_dtype)

    @property
    def narrower(self) -> Value | None:
        """The next precision that needs less memory; None if there is none, or if it saves little."""
        if self.value == "fp64":
            return "fp32"
        return "bf16_mixed" if self.compute_dtype is torch.float32 else None

    def rule_without_cuda(self) -> str | None:
        """Return the alternative for a machine without CUDA GPUs; None if this precision has an effect there."""
        if self.value != "tf32":
            return None
        return "is a mode of CUDA GPUs, and there is none here. Use precision=fp32."

    def autocast(self, device_types: Sequence[str]) -> AbstractContextManager[Any]:
        """Return the context of a forward pass and its loss, on devices of these types."""
        if self.compute_dtype is self.model_dtype:
            return _NOTHING
        if len(device_types) == 1:
            return torch.autocast(device_types[0], dtype=self.compute_dtype)
        contexts = ExitStack()
        for device_type in device_types:
            contexts.enter_context(torch.autocast(device_type, dtype=self.compute_dtype))
        return contexts

    def adapt(self, model: nn.Module) -> nn.Module:
        """Convert the model to its dtype and accept floating inputs of any dtype: data knows no precision."""
        self.accept_floats(converted_floats(model, self.model_dtype))
        return model

    def accept_floats(self, model: nn.Module) -> None:
        """Let a model of this dtype accept floating inputs of any dtype."""
        if self.model_dtype is not torch.float32:
            cast_inputs(model, self.model_dtype)

    def apply_globally(self, device_type: str, *, reproducible: bool = False) -> None:
        """Set the process-wide switches of CUDA: float32 matrix products, and the choice of convolution kernels.

        cuDNN times its kernels for each shape of a convolution and takes the fastest, which may round differently in
        each process; a reproducible run takes the kernel that cuDNN's heuristic selects.
        """
        if device_type == "cuda":
            torch.backends.cudnn.benchmark = not reproducible
            torch.set_float32_matmul_precision("high" if self.value == "tf32" else "highest")
            torch.backends.cudnn.allow_tf32 = self.value == "tf32"

    def loss_scale(self) -> LossScale:
        """Return the loss scale of a new run; constant 1 if nothing can overflow."""
        if self.value != SCALED:
            return LossScale(scale=1.0)
        return LossScale(scale=self.initial_scale, scaling=self)


def converted_floats(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert the floating parameters of a model to a dtype, in place, and return the model.

    Buffers keep dtype and bits, because no optimizer has a copy of them in higher precision: a table of positions
    would be rounded for good. In float64 they become float64, which holds each of their values.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> model.register_buffer("positions", torch.tensor([1001.0]))
        >>> converted_floats(model, torch.bfloat16).positions, model.weight.dtype
        (tensor([1001.]), torch.bfloat16)
    """
    for module in model.modules():
        dtypes = {id(buffer): buffer_dtype(module, buffer, dtype) for buffer in module.buffers(recurse=False)}
        convert = partial(_converted, dtype=param_dtype(module, dtype), dtypes=dtypes)
        module._apply(convert, recurse=False)  # type: ignore[no-untyped-call]  # noqa: SLF001 - what `to` calls
    return model


def _converted(tensor: Tensor, *, dtype: torch.dtype, dtypes: Mapping[int, torch.dtype]) -> Tensor:
    return tensor.to(dtypes.get(id(tensor), dtype)) if tensor.is_floating_point() else tensor


def param_dtype(module: nn.Module, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the parameters of one module in a model of a dtype.

    Torch's kernels of batch normalisation take bfloat16 inputs with float32 parameters and statistics, or all in one
    dtype; running statistics in bfloat16 would lose most updates.
    """
    return torch.promote_types(dtype, torch.float32) if isinstance(module, _BatchNorm) else dtype


def buffer_dtype(module: nn.Module, buffer: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a buffer of one module in a model of a dtype: its own, as `converted_floats` says."""
    if not buffer.is_floating_point():
        return buffer.dtype
    return param_dtype(module, dtype) if dtype is torch.float64 or _follows(module, buffer) else buffer.dtype


def _follows(module: nn.Module, buffer: Tensor) -> bool:
    """Return whether torch's own code computes with a buffer in the dtype of parameters: batch statistics, and what
    parametrizations keep of their weight.
    """
    names = [hook.name for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]  # noqa: SLF001
    vectors = (getattr(module, f"{name}_{part}") for name in names for part in ("u", "v"))
    return isinstance(module, _BatchNorm | _SpectralNorm | _Orthogonal) or any(buffer is vector for vector in vectors)


def buffers_apart(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating buffers that keep another dtype than that of the model, with their names."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if buffer.is_floating_point() and buffer.dtype is not dtype and not _follows(module, buffer):
                yield name, buffer


def cast_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert floating inputs of a model to its dtype.

    A product with a float32 buffer is float32. So a model with such a buffer also converts the inputs of each module
    with parameters.
    """

    def converted(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    def cast(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tree_map(converted, (args, kwargs))

    mixes = any(True for _ in buffers_apart(model, dtype))
    inner = (m for m in model.modules() if any(p.is_floating_point() for p in m.parameters(recurse=False)))
    for module in {model: None, **dict.fromkeys(inner if mixes else ())}:
        module.register_forward_pre_hook(cast, with_kwargs=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScale:
    """The factor on the loss before backward, with its history.

    It is a value: `after(overflow)` returns the next one. A step that overflowed is retried at half the scale.

    Example:
        >>> scale = Precision(value="fp16_mixed", initial_scale=8.0, growth_interval=2).loss_scale()
        >>> scale.after(overflow=True).scale, scale.after(overflow=False).after(overflow=False).scale
        (4.0, 16.0)
    """

    scale: float
    """The factor on the loss."""
    scaling: Precision | None = None
    """The precision with the parameters of its changes; None: constant."""
    good_steps: int = 0
    """Steps since the last change."""
    overflows: int = 0
    """Overflows in a row."""
    before: LossScale | None = field(default=None, repr=False, compare=False)
    """The loss scale before these overflows; None if there are none."""

    @property
    def moves(self) -> bool:
        """Whether gradients must be checked for overflow."""
        return self.scaling is not None

    @property
    def may_retry(self) -> bool:
        """Whether another overflow in a row may be retried."""
        return self.scaling is not None and self.overflows + 1 < self.scaling.max_overflows

    def after_skip(self) -> LossScale:
        """Return the loss scale after a skipped step: the one before its overflows."""
        return self.before or self

    def after(self, *, overflow: bool) -> LossScale:
        """Return the scale after a try.

        Raises:
            LossScaleError: `max_overflows` tries in a row overflowed.
        """
        if self.scaling is None:
            return self
        if overflow:
            overflows = self.overflows + 1
            if overflows >= self.scaling.max_overflows:
                raise LossScaleError(
                    f"{overflows} overflows in a row, down to a loss scale of {self.scale:g}. The gradients themselves "
                    "are not finite: lower optimizer.lr, set clip.max_norm, or use precision=bf16_mixed."
                )
            lower = max(self.scale / 2, self.scaling.min_scale)
            return replace(self, scale=lower, good_steps=0, overflows=overflows, before=self.before or self)
        good_steps = self.good_steps + 1
        if good_steps >= self.scaling.growth_interval:
            return replace(self, scale=min(self.scale * 2, _LARGEST), good_steps=0, overflows=0, before=None)
        return replace(self, good_steps=good_steps, overflows=0, before=None)

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps, "overflows": self.overflows}

    def restored(self, state: dict[str, float]) -> LossScale:
        """Return the scale with the state of a checkpoint; a constant scale ignores it."""
        if self.scaling is None:
            return self
        steps, overflows = int(state["good_steps"]), int(state["overflows"])
        return replace(self, scale=float(state["scale"]), good_steps=steps, overflows=overflows, before=None)
