"""The compiled forward passes of modules and functions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from trainkit.numerics.randomness import sets_key
from trainkit.strategies.model_transforms.recomputing import Recomputed

_MOST_VARIANTS = 64
"""Limit of compiled variants of one piece of code, beyond which it runs uncompiled; blocks of other widths share this
limit.
"""


class Compiled:
    """The compiled forward pass of a module, which replaces its own: `module.forward = Compiled(module, ...)`.

    Compiled at its first call, and again for other shapes and for evaluation.

    Args:
        mode: a mode of the inductor backend; None for any other.
    """

    runs_once: ClassVar[bool] = True
    """Whether a forward pass is computed once: a loss may be computed inside."""

    def __init__(self, module: nn.Module, *, backend: str, mode: str | None) -> None:
        self.module, self.inner = module, module.forward
        self.backend, self.mode = backend, mode
        self.is_eager = False
        """Whether the module runs its original forward."""
        self._compiled: Callable[..., Any] | None = None

    def run_eagerly(self) -> None:
        """Run the original forward of the module from now on."""
        self.is_eager = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled module on its inputs."""
        # as a part of a larger graph; is_compiling() is also true while another thread compiles
        if self.is_eager or torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
            return self.inner(*args, **kwargs)
        if self._compiled is None:
            self._compiled = self._compile()
        return self._compiled(*args, **kwargs)

    def _compile(self) -> Callable[..., Any]:
        config = torch._dynamo.config  # noqa: SLF001 - the public name of the setting
        config.recompile_limit = max(config.recompile_limit, _MOST_VARIANTS)
        # the tracer reads the gradient of inputs that are not leaves, which causes a warning
        warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
        for module in self.module.modules():
            _keep_keys_out(module)
        compiled: Callable[..., Any] = torch.compile(self.inner, backend=self.backend, mode=self.mode)
        return compiled

    def __getstate__(self) -> dict[str, Any]:
        """Drop the compiled code: a copy of the model compiles for itself, because compiled code refers to the
        parameters of this model.
        """
        return {**self.__dict__, "_compiled": None}


class CompiledFunction:
    """A function that is compiled at its first call; a copy of it compiles for itself."""

    def __init__(self, function: Callable[..., Any], *, backend: str) -> None:
        self.function, self.backend = function, backend
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        """Run the compiled function."""
        if self._compiled is None:
            self._compiled = torch.compile(self.function, backend=self.backend)
        return self._compiled(*args)

    def __getstate__(self) -> dict[str, Any]:
        """Drop the compiled code."""
        return {**self.__dict__, "_compiled": None}


def _keep_keys_out(module: nn.Module) -> None:
    """Exclude the hooks that set a block's random key from compilation, which would turn the key into a constant."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):  # noqa: SLF001 - has no public name
        for number, hook in hooks.items():
            if sets_key(hook):
                hooks[number] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]


def is_compiled(model: nn.Module) -> bool:
    """Return whether some modules of a model are compiled."""
    return any(not compiled.is_eager for compiled in _compiled_forwards(model))


def uncompiled(model: nn.Module) -> nn.Module:
    """Make the compiled modules of a model run eagerly, and return it.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> model.forward = Compiled(model, backend="aot_eager", mode=None)
        >>> is_compiled(model), is_compiled(uncompiled(model))
        (True, False)
    """
    for compiled in _compiled_forwards(model):
        compiled.run_eagerly()
    return model


def _compiled_forwards(model: nn.Module) -> Iterator[Compiled]:
    for module in model.modules():
        inner = module.forward.inner if isinstance(module.forward, Recomputed) else module.forward
        if isinstance(inner, Compiled):
            yield inner
