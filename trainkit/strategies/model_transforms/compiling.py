"""A forward pass that torch.compile makes faster."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainkit.numerics.randomness import sets_key

__all__ = ["Compiled"]

_MOST_VARIANTS = 64
"""Variants of one piece of code that are compiled before it runs as it is: blocks of other widths share theirs."""


class Compiled:
    """The forward pass of a module, in place of its own: `module.forward = Compiled(module, ...)`.

    Compiled when it is first called, and again for other shapes and for evaluation.

    Args:
        module: the module; its forward as it is now is what is compiled.
        backend: a backend of torch.compile.
        mode: a mode of the inductor backend; None for any other.
    """

    def __init__(self, module: nn.Module, *, backend: str, mode: str | None) -> None:
        self.module, self.inner = module, module.forward
        self.backend, self.mode = backend, mode
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module makes of its inputs."""
        if self._compiled is None:
            self._compiled = self._compile()
        return self._compiled(*args, **kwargs)

    def _compile(self) -> Callable[..., Any]:
        config = torch._dynamo.config  # noqa: SLF001 - its public name
        config.recompile_limit = max(config.recompile_limit, _MOST_VARIANTS)
        # its tracer looks at the gradient of inputs that have none, and is warned of it
        warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
        for module in self.module.modules():
            _keep_keys_out(module)
        made: Callable[..., Any] = torch.compile(self.inner, backend=self.backend, mode=self.mode)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the model compiles for itself: what is compiled here computes with these parameters."""
        return {**self.__dict__, "_compiled": None}


def _keep_keys_out(module: nn.Module) -> None:
    """Keep the hooks that key a block's randomness out of what is compiled: there a key would become a constant."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):  # noqa: SLF001 - has no public name
        for number, hook in hooks.items():
            if sets_key(hook):
                hooks[number] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
