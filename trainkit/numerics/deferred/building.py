"""Build a model without its values, and compute the initial values of each tensor on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from trainkit.numerics.deferred.recording import CannotDeferError, Recorder, TensorVersion, fake_cpu_device


class InitialValues(Mapping[str, Tensor]):
    """The initial parameters and buffers of a deferred model, by canonical name; each is computed on access.

    Each access returns a new tensor on the CPU, in its original dtype. Tied names give equal values. The cost is the
    time and memory of initializing that tensor, and no more, as long as one tensor is accessed at a time.
    """

    def __init__(self, recorded: Mapping[str, TensorVersion | Tensor]) -> None:
        self._recorded = recorded

    def __getitem__(self, name: str) -> Tensor:
        """Return the initial values of a tensor."""
        recorded = self._recorded[name]
        with torch.no_grad():
            return recorded.value() if isinstance(recorded, TensorVersion) else recorded.clone()

    def __iter__(self) -> Iterator[str]:
        """Iterate the names of parameters, then of buffers."""
        return iter(self._recorded)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._recorded)


def build_deferred(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model on the meta device; `lazy_init_values` then returns its initial values.

    Args:
        build: builds the model; it draws from torch's default generator, which ends in the state of a normal build.

    Returns:
        The model, with all its parameters and buffers on the meta device. Tensors in plain attributes of its modules
        have values.

    Raises:
        CannotDeferError: the constructor cannot be recorded. A constructor may also fail with another error if it
            reads values in an unsupported way (`.numpy()`); then, too, the model must be built normally.

    Example:
        >>> with torch.random.fork_rng(devices=[]):
        ...     model = build_deferred(lambda: nn.Linear(3, 2))
        >>> model.weight.device.type, lazy_init_values(model)["weight"].shape
        ('meta', torch.Size([2, 3]))
    """
    recorder = Recorder()
    with fake_cpu_device(recorder.fakes_cpu), recorder:
        model = build()
    if recorder.refused is not None:
        raise CannotDeferError(recorder.refused)
    recorded: dict[str, TensorVersion | Tensor] = {}
    for name, tensor in _named(model):
        tape = recorder.tape_of(tensor)
        if tape is None and tensor.is_meta:
            raise CannotDeferError(name)
        recorded[name] = tensor.detach().clone() if tape is None else TensorVersion.of(tensor, tape)
    _empty(model)
    for module in model.modules():
        _fill_attributes(module, recorder)
    _VALUES[model] = InitialValues(recorded)
    return model


_VALUES: WeakKeyDictionary[nn.Module, InitialValues] = WeakKeyDictionary()


def lazy_init_values(model: nn.Module) -> InitialValues | None:
    """Return the initial values of a deferred model; None for a model that has its values."""
    return _VALUES.get(model)


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _empty(model: nn.Module) -> None:
    """Move tensors to which the constructor gave values to the meta device as well."""
    emptied: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay tied
    for module in model.modules():
        for name, param in module._parameters.items():  # noqa: SLF001 - has no public name
            if param is not None and not param.is_meta:
                fresh = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
                module._parameters[name] = emptied.setdefault(param, fresh)  # noqa: SLF001
        for name, buffer in module._buffers.items():  # noqa: SLF001
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to("meta")  # noqa: SLF001


def _fill_attributes(module: nn.Module, recorder: Recorder) -> None:
    """Compute the tensors that are neither parameters nor buffers, which strategies do not know."""
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
