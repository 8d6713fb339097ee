"""Run the forward pass of a shard once, and record the model's inputs and outputs, and which object draws random
numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.data.reading.collate import collate
from trainkit.numerics.generators import HostStates, seed_host
from trainkit.objectives.base import Objective

__all__ = ["MODEL", "OBJECTIVE", "Pass", "Shard", "kept_generators"]

MODEL, OBJECTIVE = "the model", "the objective"


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The record of one run of a shard."""

    inputs: tuple[Tensor, ...]
    """Inputs of the model that have an element for each sample, with that dim first."""
    outputs: tuple[Tensor, ...]
    """Outputs of the model that have an element for each sample, with that dim first."""
    grads: tuple[Tensor | None, ...]
    """The gradient of the loss with respect to each of these outputs."""
    total: Tensor
    """() the loss that backward would start from, detached."""
    buffers: Mapping[str, Tensor]
    """The floating-point buffers of the model after the pass."""
    drew: frozenset[str]
    """Which objects drew random numbers: MODEL, OBJECTIVE."""


class Shard:
    """A model, an objective, and two samples for each position of a shard.

    Args:
        model: on the CPU, in training mode.
        objective: computes the loss of the shard.
        samples: the samples of the shard, and as many that replace them; all of equal shapes.
    """

    def __init__(self, model: nn.Module, objective: Objective, samples: Sequence[Any]) -> None:
        self._model, self._objective = model, objective
        self.size = len(samples) // 2
        self._first, self._other = samples[: self.size], samples[self.size :]
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def run(self, replaced: frozenset[int] = frozenset(), places: Sequence[int] | None = None) -> Pass:
        """Run the shard, always from the same buffers and generator states.

        Args:
            replaced: positions that use their replacement sample.
            places: the positions to run; None: all.
        """
        places = range(self.size) if places is None else places
        batch = collate([(self._other if i in replaced else self._first)[i] for i in places], places)
        with torch.no_grad():
            for name, buffer in self._model.named_buffers():
                buffer.copy_(self._buffers[name])
        seed_host(0)
        recorder = _CallRecorder(len(places))
        with recorder.recording(self._model):
            loss = self._objective.loss(self._model, batch)
        total = loss.loss_sum if loss.extra is None else loss.loss_sum + loss.extra * loss.weight
        return Pass(
            inputs=tuple(recorder.inputs),
            outputs=tuple(recorder.outputs),
            grads=recorder.grads(total),
            total=total.detach(),
            buffers={name: t.clone() for name, t in self._model.named_buffers() if t.is_floating_point()},
            drew=frozenset(recorder.drew),
        )


class _CallRecorder:
    """Records the calls of a model while an objective runs it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._given: list[tuple[Tensor, int]] = []
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.drew: set[str] = set()
        self._state = _comparable_state()

    @contextmanager
    def recording(self, model: nn.Module) -> Iterator[None]:
        """Record every call of the model until the block ends."""
        hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after),
        ]
        try:
            yield
            self._note(OBJECTIVE)
        finally:
            for hook in hooks:
                hook.remove()

    def grads(self, total: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the loss with respect to each output."""
        wanted = [tensor for tensor, _ in self._given if tensor.requires_grad]
        if not wanted or not total.requires_grad:
            return (None,) * len(self._given)
        found = iter(torch.autograd.grad(total, wanted, allow_unused=True))
        by_output = [(next(found) if tensor.requires_grad else None, dim) for tensor, dim in self._given]
        return tuple(None if grad is None else grad.movedim(dim, 0) for grad, dim in by_output)

    def _before(self, _model: nn.Module, args: Any, kwargs: Any) -> None:
        self._note(OBJECTIVE)
        self.inputs += [tensor.detach().movedim(dim, 0).clone() for tensor, dim in self._by_sample([args, kwargs])]

    def _after(self, _model: nn.Module, _args: Any, output: Any) -> None:
        self._note(MODEL)
        found = list(self._by_sample(output))
        self._given += found
        self.outputs += [tensor.detach().movedim(dim, 0).clone() for tensor, dim in found]

    def _by_sample(self, value: Any) -> Iterator[tuple[Tensor, int]]:
        """Yield tensors with one element per sample, and that dim: the first, or the only one of that size."""
        for tensor in _tensors_in(value):
            dims = [dim for dim, size in enumerate(tensor.shape) if size == self._size]
            if dims and (dims[0] == 0 or len(dims) == 1):
                yield tensor, dims[0]

    def _note(self, who: str) -> None:
        state = _comparable_state()
        if state != self._state:
            self.drew.add(who)
        self._state = state


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restore the generators of torch (CPU), `random` and NumPy when the block ends."""
    torch_state, host = torch.default_generator.get_state(), HostStates.now()
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        host.restore()


def _comparable_state() -> tuple[Any, ...]:
    host = HostStates.now()
    _, keys, *rest = host.numpy
    return torch.default_generator.get_state().numpy().tobytes(), host.python, keys.tobytes(), tuple(rest)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors_in(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors_in(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors_in(getattr(value, field.name))
