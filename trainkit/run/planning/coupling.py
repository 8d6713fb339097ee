"""Find by execution whether a model or an objective draws random numbers or couples the samples of a shard.

A shard is run several times from the same generator states and buffers, each time with other samples at some of its
positions. At the positions that keep their samples, the inputs and outputs of the model must keep their bits, and so
must the gradient of the loss with respect to the outputs, except for rounding. The loss must be a sum over samples: of
the four shards made of two choices of samples for each of two parts, the losses of opposite pairs have equal sums.
Names of layers are not considered. Effects that four samples do not show (a router that drops samples only when it is
full) are not found.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from trainkit.data.reading.collate import CollateFunction, collate
from trainkit.numerics.generators import GeneratorStates, seed_host
from trainkit.objectives.base import Objective
from trainkit.objectives.linear_cross_entropy import scores_kept

DRAWS: Final = "draws random numbers"
COUPLES: Final = "couples the samples of a shard"
_KEEPS: Final = "keeps statistics of a shard in its buffers"
_UNSTEADY: Final = "returns different numbers when it runs again"
_EITHER: Final = "the model or the objective"
_ROUNDING: Final = 64.0
"""Tolerance, in units in the last place, for sums over a shard in another order."""


@dataclass(frozen=True, kw_only=True)
class Coupling:
    """The known reasons why the result of a training depends on the cut of its steps."""

    found: tuple[tuple[str, str], ...] = ()
    """(subject, predicate): `("the model", "draws random numbers")`."""
    not_probed: str | None = None
    """Reason why the model was not run (to the end); None if it was, or if the objective declares coupling."""

    @property
    def depends_on_cut(self) -> bool | None:
        """Whether another cut of the steps is a different training; None if unknown."""
        return True if self.found else None if self.not_probed else False

    @property
    def text(self) -> str:
        """The findings, as a clause.

        Example:
            >>> Coupling(found=((MODEL, DRAWS), (MODEL, COUPLES))).text
            'the model draws random numbers and couples the samples of a shard'
        """
        subjects = dict.fromkeys(subject for subject, _ in self.found)
        by_subject = {name: [does for subject, does in self.found if subject == name] for name in subjects}
        return ", and ".join(f"{subject} {' and '.join(does)}" for subject, does in by_subject.items())


def probe(
    model: nn.Module, objective: Objective, samples: Sequence[Any], collate: CollateFunction = collate
) -> Coupling:
    """Run a model and an objective on variants of one shard, and compare.

    Args:
        model: a model used only for the probe, on the CPU, in training mode; its parameters are changed.
        objective: an objective used only for the probe.
        samples: an even number of samples of equal shapes; the second half replaces the first.
        collate: makes a batch of samples.

    Returns:
        The findings. The generators of torch (CPU), `random` and NumPy are restored.
    """
    with kept_generators(), warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        _vary_constant_parameters(model)
        return _findings(Shard(model, objective, samples, collate))


def _vary_constant_parameters(model: nn.Module) -> None:
    """Change parameters whose elements are all equal: a layer initialised to zero would hide the layers before it."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            if param.numel() and param.is_floating_point() and bool((param == param.reshape(-1)[0]).all()):
                noise = torch.rand(param.shape, generator=generator).mul_(0.2).sub_(0.1).to(param.dtype)
                param.add_(torch.where(param == 0, noise, noise * param))


def _findings(shard: Shard) -> Coupling:
    """Compare the variants of a shard with the shard itself."""
    base = shard.run()
    if not all(bool(torch.isfinite(tensor).all()) for tensor in (*base.outputs, base.total)):
        return Coupling(not_probed="the first outputs or losses are not finite numbers")
    found = [(who, DRAWS) for who in (MODEL, OBJECTIVE) if who in base.drew]
    again = shard.run()
    if not _equal(base.outputs, again.outputs) or not torch.equal(base.total, again.total):
        return Coupling(found=(*found, (_EITHER, _UNSTEADY)))
    runs = {replaced: shard.run(replaced) for replaced in _variants(shard.size)}
    if base.inputs and _equal(base.inputs, runs[frozenset(range(shard.size))].inputs):
        return Coupling(found=tuple(found), not_probed="the samples that were tried are all equal")
    # Compare at the positions that keep their samples.
    kept = [([place for place in range(shard.size) if place not in replaced], run) for replaced, run in runs.items()]
    if not all(_equal(base.inputs, run.inputs, places) for places, run in kept):
        found.append((OBJECTIVE, COUPLES))
    elif not all(_equal(base.outputs, run.outputs, places) for places, run in kept):
        found.append((MODEL, COUPLES))
    elif _buffers_depend_on_cut(shard, base, runs):
        found.append((MODEL, _KEEPS))
    if all(does != COUPLES for _, does in found) and (
        not all(_grads_close(base, run, places) for places, run in kept) or not _is_sum(base, runs)
    ):
        found.append((OBJECTIVE if base.outputs else _EITHER, COUPLES))
    return Coupling(found=tuple(found))


def _variants(size: int) -> list[frozenset[int]]:
    """Return sets of positions to replace: every position is replaced while every other is kept; then halves, and all.

    Example:
        >>> [sorted(places) for places in _variants(4)]
        [[1, 3], [0, 2], [2, 3], [0, 1], [0, 1, 2, 3]]
    """
    everywhere = frozenset(range(size))
    found = []
    for bit in range((size - 1).bit_length()):
        chosen = frozenset(place for place in everywhere if place >> bit & 1)
        found += [chosen, everywhere - chosen]
    return [*found, everywhere]


def _equal(left: Sequence[Tensor], right: Sequence[Tensor], places: Sequence[int] | None = None) -> bool:
    """Return whether tensors have equal bits, optionally only at some positions."""
    if len(left) != len(right):
        return False
    pairs = zip(left, right, strict=True)
    return all(torch.equal(*((one, other) if places is None else (one[places], other[places]))) for one, other in pairs)


def _close(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """Return whether two tensors are equal except for rounding in a dtype."""
    if not one.numel():
        return True
    scale = torch.maximum(one.abs().max(), other.abs().max())
    return not bool(((one - other).abs() > _ROUNDING * torch.finfo(dtype).eps * scale).any())


def _grads_close(base: Pass, run: Pass, places: Sequence[int]) -> bool:
    """Return whether the gradient by the outputs is the same at some positions, except for rounding."""
    pairs = [(one, other) for one, other in zip(base.grads, run.grads, strict=True) if one is not None]
    return all(other is not None and _close(one[places], other[places], one.dtype) for one, other in pairs)


def _is_sum(base: Pass, runs: Mapping[frozenset[int], Pass]) -> bool:
    """Return whether the loss of a shard is a sum of contributions of its parts, independent of the other positions.

    The gradient by outputs does not show an auxiliary loss that the model computes from its hidden states.
    """
    everywhere = max(runs, key=len)
    for replaced, run in runs.items():
        if replaced == everywhere:
            continue
        totals = [base.total, runs[everywhere].total, run.total, runs[everywhere - replaced].total]
        rounding = _ROUNDING * torch.finfo(base.total.dtype).eps * float(sum(total.abs() for total in totals))
        if float((totals[0] + totals[1] - totals[2] - totals[3]).abs()) > rounding:
            return False
    return True


def _buffers_depend_on_cut(shard: Shard, base: Pass, runs: Mapping[frozenset[int], Pass]) -> bool:
    """Return whether buffers depend on the samples, and differ from the mean over two halves."""
    whole = runs[frozenset(range(shard.size))].buffers
    moved = [name for name, buffer in base.buffers.items() if not torch.equal(buffer, whole[name])]
    if not moved or shard.size % 2:
        return bool(moved)
    middle = shard.size // 2
    one, other = (shard.run(places=range(*ends)).buffers for ends in ((0, middle), (middle, shard.size)))
    means = {name: (one[name] + other[name]) / 2 for name in moved}
    return not all(_close(base.buffers[name], mean, mean.dtype) for name, mean in means.items())


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
    """Objects that drew random numbers: MODEL, OBJECTIVE."""


class Shard:
    """A model, an objective, and two samples for each position of a shard.

    Args:
        model: on the CPU, in training mode.
        objective: computes the loss of the shard.
        samples: the samples of the shard, and as many that replace them; all of equal shapes.
        collate: makes a batch of samples.
    """

    def __init__(
        self, model: nn.Module, objective: Objective, samples: Sequence[Any], collate: CollateFunction
    ) -> None:
        self._model, self._objective, self._collate = model, objective, collate
        self.size = len(samples) // 2
        self._first, self._other = samples[: self.size], samples[self.size :]
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def run(self, replaced: frozenset[int] = frozenset(), places: Sequence[int] | None = None) -> Pass:
        """Run some positions of the shard, by default all, always from the same buffers and generator states; some use
        their replacement sample.
        """
        places = range(self.size) if places is None else places
        batch = self._collate([(self._other if i in replaced else self._first)[i] for i in places], places)
        with torch.no_grad():
            for name, buffer in self._model.named_buffers():
                buffer.copy_(self._buffers[name])
        seed_host(0)
        recorder = _CallRecorder(len(places))
        kept = scores_kept() if self._objective.takes_hidden else nullcontext()
        with recorder.recording(self._model), kept:
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
        self._state = GeneratorStates([])

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
        if self._state.moved():
            self.drew.add(who)
        self._state = GeneratorStates([])


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restore the generators of torch (CPU), `random` and NumPy when the block ends."""
    states = GeneratorStates([])
    try:
        yield
    finally:
        states.restore()


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
