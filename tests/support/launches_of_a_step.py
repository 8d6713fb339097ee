"""What a step makes the host do: kernels it launches, values it reads, numbers it copies to the device."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_VIEWS = frozenset(
    {"detach", "view", "t", "transpose", "expand", "as_strided", "select", "slice", "unsqueeze", "squeeze", "permute"}
    | {"alias", "_unsafe_view", "split", "unbind", "_reshape_alias", "lift_fresh", "_local_scalar_dense"}
)
"""Operations that launch no kernel on a GPU."""
_READS = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal"})
"""Operations whose answer the host needs: on a GPU it waits for the device."""


@dataclass
class Calls:
    """Counts of one phase or step."""

    launches: int = 0
    reads: int = 0
    host_copies: int = 0
    """Tensors made from numbers of the host, which on a GPU are copied there."""
    names: Counter[str] = field(default_factory=Counter)


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
        name = func.overloadpacket.__name__
        with self._lock:
            calls = self.phases.setdefault(self._phase, Calls())
            calls.launches += name not in _VIEWS and func.namespace == "aten"
            calls.reads += name in _READS
            calls.host_copies += name == "lift_fresh"
            calls.names[name] += 1
        return func(*args, **(kwargs or {}))

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
