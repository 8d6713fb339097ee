"""What a step asks of a device, counted by operations on the CPU: kernels, reads, copies, bytes that are alive."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self
from unittest import mock
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from trainkit.run.estimates.outlook import is_free
from trainkit.strategies.core.graphs.whole import WholeGraph

_MOST_TENSORS: Final = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
"""Number of lists of an operation -> tensors of each that a launch takes; torch/.../MultiTensorApply.cuh."""


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the launches of the operations that run inside; a view or an allocation is none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for every operation."""
        result = func(*args, **(kwargs or {}))
        name: str = func._schema.name
        lists = [arg for arg in args if isinstance(arg, list | tuple) and arg]
        if name.startswith(("aten::_foreach_", "aten::_fused_")):
            self.by_name[name] += -(-len(lists[0]) // _MOST_TENSORS[min(len(lists), 5)])
        elif not is_free(func):
            self.by_name[name] += 1
        return result

    @property
    def total(self) -> int:
        """All of them."""
        return self.by_name.total()


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
            launches=sum(calls.launches for calls in every),
            reads=sum(calls.reads for calls in every),
            host_copies=sum(calls.host_copies for calls in every),
            names=sum((calls.names for calls in every), Counter()),
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
        targets = [node.target for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]

        def run(*args: Any) -> Any:
            trace.count(*targets)
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


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, the memory below every tensor that an operation makes is counted for as long as it lives.

    Memory is counted by storage, once however many tensors look at it, and with the bytes it has at that moment: FSDP
    empties storages and fills them again. The most is counted anew after each fused update of an optimizer.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        """Of all that is alive now."""
        self.lasting = 0
        """When the last update began: parameters, gradients, the optimizer's state, and next to nothing else."""
        self.peak = 0
        """The most between the last two updates, the first excluded."""
        self.most = 0
        """The most since the last update."""
        self._sizes: dict[weakref.ref[torch.UntypedStorage], int] = {}
        self._resize = mock.patch.object(torch.UntypedStorage, "resize_", _watched(self))

    def __enter__(self) -> Self:
        self._resize.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._resize.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for every operation."""
        updates = func.__name__.startswith("_fused_")
        if updates and self.most:
            self.lasting, self.peak, self.most = self.bytes, max(self.most, self.bytes), 0
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.see((leaf.to_local() if isinstance(leaf, DTensor) else leaf).untyped_storage())
        if not updates:
            self.most = max(self.most, self.bytes)
        return result

    def see(self, storage: torch.UntypedStorage) -> None:
        """Count a storage with the bytes it has now."""
        if storage.device.type != "cpu":
            return
        key = weakref.ref(storage, self._forget)
        self.bytes += storage.nbytes() - self._sizes.get(key, 0)
        self._sizes[key] = storage.nbytes()

    def _forget(self, key: weakref.ref[torch.UntypedStorage]) -> None:
        self.bytes -= self._sizes.pop(key, 0)


def _watched(counting: Counting) -> Any:
    resize: Any = torch.UntypedStorage.resize_

    def watched(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        counting.see(storage)
        return result

    return watched
