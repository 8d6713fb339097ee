"""A forward pass that is compiled by torch.compile."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainkit.numerics.randomness import sets_key

__all__ = ["Compiled"]

_MOST_VARIANTS = 64
"""Number of compiled variants of one piece of code before it runs uncompiled: blocks of other widths share
its limit.
"""


class Compiled:
    """The compiled forward pass of a module, which replaces its own: `module.forward = Compiled(module, ...)`.

    Compiled at its first call, and again for other shapes and for evaluation.

    Args:
        module: the module; its current forward is compiled.
        backend: a backend of torch.compile.
        mode: a mode of the inductor backend; None for any other.
    """

    def __init__(self, module: nn.Module, *, backend: str, mode: str | None) -> None:
        self.module, self.inner = module, module.forward
        self.backend, self.mode = backend, mode
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled module on its inputs."""
        if self._compiled is None:
            self._compiled = self._compile()
        return self._compiled(*args, **kwargs)

    def _compile(self) -> Callable[..., Any]:
        config = torch._dynamo.config  # noqa: SLF001 - the public name of the setting
        config.recompile_limit = max(config.recompile_limit, _MOST_VARIANTS)
        # the tracer reads the gradient of inputs that are no leaves, which causes a warning
        warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
        for module in self.module.modules():
            _keep_keys_out(module)
        made: Callable[..., Any] = torch.compile(self.inner, backend=self.backend, mode=self.mode)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Drop the compiled code: a copy of the model compiles for itself, because this code uses these parameters."""
        return {**self.__dict__, "_compiled": None}


def _keep_keys_out(module: nn.Module) -> None:
    """Exclude the hooks that set a block's random key from compilation, which would turn the key into a constant."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):  # noqa: SLF001 - has no public name
        for number, hook in hooks.items():
            if sets_key(hook):
                hooks[number] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
