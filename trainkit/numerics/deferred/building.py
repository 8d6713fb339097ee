"""A model built without its numbers, and the numbers of each of its tensors on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from trainkit.numerics.deferred.fake_device import posing
from trainkit.numerics.deferred.recording import Recorder
from trainkit.numerics.deferred.tape import CannotDeferError, TensorVersion

__all__ = ["InitialValues", "build_deferred", "lazy_init_values"]


class InitialValues(Mapping[str, Tensor]):
    """The initial parameters and buffers of a deferred model, by canonical name; each is made when it is asked for.

    What is asked for is new on every call, on the CPU and in the dtype that it was built in. Tied names give the same
    numbers. Making one costs the time and memory of initialising that tensor, and no more: ask for one at a time.
    """

    def __init__(self, noted: Mapping[str, TensorVersion | Tensor]) -> None:
        self._noted = noted

    def __getitem__(self, name: str) -> Tensor:
        """The numbers of a tensor."""
        noted = self._noted[name]
        with torch.no_grad():
            return noted.value() if isinstance(noted, TensorVersion) else noted.clone()

    def __iter__(self) -> Iterator[str]:
        """The names of parameters, then of buffers."""
        return iter(self._noted)

    def __len__(self) -> int:
        """Tensors there are."""
        return len(self._noted)


def build_deferred(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model on the meta device; `lazy_init_values` of it then gives its numbers.

    Args:
        build: builds it; what it draws comes from torch's default generator, which ends as if it had been built whole.

    Returns:
        The model, all its parameters and buffers on the meta device. What its modules keep as plain attributes has
        numbers.

    Raises:
        CannotDeferError: it does what cannot be written down. A constructor may also fail in its own way where it
            reads a number in one that is not foreseen (`.numpy()`); then, too, it has to be built whole.

    Example:
        >>> with torch.random.fork_rng(devices=[]):
        ...     model = build_deferred(lambda: nn.Linear(3, 2))
        >>> model.weight.device.type, lazy_init_values(model)["weight"].shape
        ('meta', torch.Size([2, 3]))
    """
    recorder = Recorder()
    with posing(recorder.poses), recorder:
        model = build()
    noted: dict[str, TensorVersion | Tensor] = {}
    for name, tensor in _named(model):
        tape = recorder.tape_of(tensor)
        if tape is None and tensor.is_meta:
            raise CannotDeferError(name)
        noted[name] = tensor.detach().clone() if tape is None else TensorVersion.of(tensor, tape)
    _empty(model)
    for module in model.modules():
        _fill_attributes(module, recorder)
    _VALUES[model] = InitialValues(noted)
    return model


_VALUES: WeakKeyDictionary[nn.Module, InitialValues] = WeakKeyDictionary()


def lazy_init_values(model: nn.Module) -> InitialValues | None:
    """The numbers that a deferred model begins with; None for a model that has its numbers."""
    return _VALUES.get(model)


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _empty(model: nn.Module) -> None:
    """Put what the constructor gave numbers to on the meta device as well."""
    emptied: dict[nn.Parameter, nn.Parameter] = {}  # tied ones stay tied
    for module in model.modules():
        for name, param in module._parameters.items():  # noqa: SLF001 - has no public name
            if param is not None and not param.is_meta:
                fresh = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
                module._parameters[name] = emptied.setdefault(param, fresh)  # noqa: SLF001
        for name, buffer in module._buffers.items():  # noqa: SLF001
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to("meta")  # noqa: SLF001


def _fill_attributes(module: nn.Module, recorder: Recorder) -> None:
    """Give numbers to tensors that no strategy knows of: those that are neither parameters nor buffers."""
    for name, value in list(module.__dict__.items()):
        if name in ("_parameters", "_buffers", "_modules"):
            continue
        filled = tree_map(lambda leaf: _filled(leaf, recorder), value)
        if isinstance(value, list):
            value[:] = filled
        elif isinstance(value, Tensor | tuple | dict):
            module.__dict__[name] = filled


def _filled(leaf: Any, recorder: Recorder) -> Any:
    tape = recorder.tape_of(leaf) if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) else None
    return leaf if tape is None else TensorVersion.of(leaf, tape).value()
