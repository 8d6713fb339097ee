"""Bytes of all tensors that are alive, counted operation by operation."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch for every operation."""
        updates = func.__name__.startswith("_fused_")
        if updates and self.most:
            self.lasting, self.peak, self.most = self.bytes, max(self.most, self.bytes), 0
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                self.see((leaf.to_local() if isinstance(leaf, DTensor) else leaf).untyped_storage())
        if not updates:
            self.most = max(self.most, self.bytes)
        return found

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
        found = resize(storage, size)
        counting.see(storage)
        return found

    return watched
