"""What a step makes the host do: kernels it launches, values it reads, numbers it copies to the device."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from trainkit.strategies.core.graphs.whole import WholeGraph

_VIEWS = frozenset(
    {"detach", "view", "t", "transpose", "expand", "as_strided", "select", "slice", "unsqueeze", "squeeze", "permute"}
    | {"alias", "_unsafe_view", "split", "unbind", "_reshape_alias", "lift_fresh", "_local_scalar_dense"}
)
"""Operations that launch no kernel on a GPU."""
_READS = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal"})
"""Operations whose answer the host needs: on a GPU it waits for the device."""
_HOST_COPIES = frozenset({"lift_fresh", "lift_fresh_copy"})
"""Operations that make a tensor from numbers of the host."""


@dataclass
class Calls:
    """Counts of one phase or step."""

    launches: int = 0
    reads: int = 0
    host_copies: int = 0
    """Tensors made from numbers of the host, which on a GPU are copied there."""
    names: Counter[str] = field(default_factory=Counter)

    def count(self, operation: Any) -> None:
        """Count a call of an operation of torch's dispatcher."""
        name = operation.overloadpacket.__name__
        self.launches += name not in _VIEWS and operation.namespace == "aten"
        self.reads += name in _READS
        self.host_copies += name in _HOST_COPIES
        self.names[name] += 1


class StepTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the calls of a step by phase: the trace is the executor's phase listener, too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phases: dict[str, Calls] = {}
        self._phase = "begin"
        self._lock = threading.Lock()

    def listen(self, phase: str, step: int) -> None:
        """Count what follows as part of a phase."""
        del step
        self._phase = phase

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a call, and make it."""
        self.count(func)
        return func(*args, **(kwargs or {}))

    def count(self, *operations: Any) -> None:
        """Count calls in the current phase."""
        with self._lock:
            calls = self.phases.setdefault(self._phase, Calls())
            for operation in operations:
                calls.count(operation)

    @property
    def total(self) -> Calls:
        """The counts of all phases together."""
        every = self.phases.values()
        return Calls(
            launches=sum(one.launches for one in every),
            reads=sum(one.reads for one in every),
            host_copies=sum(one.host_copies for one in every),
            names=sum((one.names for one in every), Counter()),
        )


@contextmanager
def counting_graphs(trace: StepTrace) -> Iterator[None]:
    """Let each run of a graph of `compile.mode=step` count the operations of the graph.

    Under a dispatch mode torch compiles nothing, so the graphs run without the trace. Inductor fuses some of their
    operations: the count is the most that it launches.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func

    def compiled(graph: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        found = [one.target for one in graph.graph.nodes if isinstance(one.target, torch._ops.OpOverload)]

        def run(*args: Any) -> Any:
            trace.count(*found)
            return graph(*args)

        boxed: Callable[..., Any] = make_boxed_func(run)
        return boxed

    def untraced(graph: WholeGraph, *args: Any, unchanged: bool = False) -> Any:
        with _disable_current_modes():
            return call(graph, *args, unchanged=unchanged)

    call = WholeGraph.__call__
    backend = aot_autograd(fw_compiler=compiled)
    with (
        patch.object(torch._dynamo, "lookup_backend", lambda _name: backend),
        patch.object(WholeGraph, "__call__", untraced),
    ):
        yield
