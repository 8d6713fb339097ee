"""How many kernels a GPU would be asked for, counted operation by operation on the CPU."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from torch.utils._python_dispatch import TorchDispatchMode

from trainkit.run.estimates.outlook import is_free

_MOST_TENSORS: Final = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
"""Number of lists of an operation -> tensors of each that a launch takes; torch/.../MultiTensorApply.cuh."""


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the launches of the operations that run inside; a view or an allocation is none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch for every operation."""
        found = func(*args, **(kwargs or {}))
        name: str = func._schema.name
        lists = [one for one in args if isinstance(one, list | tuple) and one]
        if name.startswith(("aten::_foreach_", "aten::_fused_")):
            self.by_name[name] += -(-len(lists[0]) // _MOST_TENSORS[min(len(lists), 5)])
        elif not is_free(func):
            self.by_name[name] += 1
        return found

    @property
    def total(self) -> int:
        """All of them."""
        return self.by_name.total()
