"""Histograms of gradients, activations and weights, layer by layer."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Annotated, Any, Final, Literal, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainkit.callbacks.every_run import append_rows, keep_until
from trainkit.callbacks.tensorboard import EventFolder
from trainkit.errors import Problem
from trainkit.fields import at_least, cosmetic, unit
from trainkit.objectives.base import Collective
from trainkit.objectives.linear_cross_entropy import offered_by
from trainkit.report.numbers import evenly
from trainkit.strategies.base import GradientListener, PhaseListener, StepOutcome, UpdateTensors
from trainkit.trainer.events import Callback, Planned, Run

_PER_OCTAVE: Final = 4
_LOW, _HIGH = -40, 40
"""Magnitudes from 2^-40 (9e-13) to 2^40; smaller and larger ones are in the first and the last bucket."""
_SIDE: Final = (_HIGH - _LOW) * _PER_OCTAVE
"""Buckets of the positive values; the negative ones have as many."""
_ZERO: Final = _SIDE
_NONFINITE: Final = 2 * _SIDE + 1
NUM_COUNTS: Final = _NONFINITE + 1
"""Counts of a distribution: negative values, zero, positive values, values that are not finite."""
_SUMS: Final = 2
_CHUNK: Final = 1 << 22
"""Number of values that are sorted into buckets at once; bounds the temporary memory for a large tensor."""
QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95)


@torch.no_grad()
def measure(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Count the values of a tensor, on its device.

    Args:
        tensor: of any shape and floating dtype; of a sparse one, the values that it holds.

    Returns:
        (NUM_COUNTS + 2,) float64, which adds up over tensors: counts, the sum of the finite values and of their
        squares; and (2,) float64, the least and the largest finite value, infinite ones if there is none.

    Example:
        >>> sums, extrema = measure(torch.tensor([0.0, 1.0, -3.0, float("nan")]))
        >>> int(sums[:NUM_COUNTS].sum()), sums[-2:].tolist(), extrema.tolist()
        (4, [-2.0, 10.0], [-3.0, 1.0])
    """
    values = (tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()).reshape(-1)
    sums = torch.zeros(NUM_COUNTS + _SUMS, dtype=torch.float64, device=values.device)
    extrema = torch.tensor([math.inf, -math.inf], dtype=torch.float64).to(values.device)
    for chunk in torch.split(values, _CHUNK) if values.numel() else ():
        part = chunk if chunk.dtype is torch.float64 else chunk.float()
        finite = torch.isfinite(part)
        clean = torch.where(finite, part, 0.0)
        octaves = torch.log2(clean.abs()).mul_(_PER_OCTAVE).floor_().clamp_(_LOW * _PER_OCTAVE, _HIGH * _PER_OCTAVE - 1)
        buckets = _ZERO + clean.sign() * (1 + octaves - _LOW * _PER_OCTAVE)
        buckets = torch.where(finite, buckets, _NONFINITE).to(torch.int64)
        sums[:NUM_COUNTS] += torch.bincount(buckets, minlength=NUM_COUNTS)
        wide = clean.double()
        sums[-2] += wide.sum()
        sums[-1] += wide.square().sum()
        low, high = torch.where(finite, part, math.inf).min(), torch.where(finite, part, -math.inf).max()
        extrema = torch.stack([torch.minimum(extrema[0], low.double()), torch.maximum(extrema[1], high.double())])
    return sums, extrema


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """The distribution of the values of one tensor, on the host."""

    counts: tuple[int, ...]
    """The values in each bucket, then those that are not finite."""
    total: float
    """Sum of the finite values."""
    squares: float
    """Sum of their squares."""
    low: float
    """The least finite value; infinite if there is none."""
    high: float

    @classmethod
    def of(cls, sums: Tensor, extrema: Tensor) -> Self:
        """Return the distribution that `measure` has counted, possibly added up over parts."""
        *counts, total, squares = sums.tolist()
        low, high = extrema.tolist()
        return cls(counts=tuple(map(int, counts)), total=total, squares=squares, low=low, high=high)

    @property
    def num_finite(self) -> int:
        """Number of finite values."""
        return sum(self.counts[:_NONFINITE])

    def quantiles(self, shares: Sequence[float] = QUANTILES) -> list[float]:
        """Return quantiles of the magnitudes, to a quarter of an octave (9 % up or down); a zero is 0.

        Example:
            >>> Distribution.of(*measure(torch.tensor([0.0, 0.0, 1.0, 1.0]))).quantiles((0.5, 0.75))
            [0.0, 1.0905077326652577]
        """
        sides = zip(reversed(self.counts[:_ZERO]), self.counts[_ZERO + 1 : _NONFINITE], strict=True)
        magnitudes = [self.counts[_ZERO], *(below + above for below, above in sides)]
        values, bucket, cumulative = [], 0, magnitudes[0]
        for share in sorted(shares):
            while cumulative < share * self.num_finite and bucket < _SIDE:
                bucket += 1
                cumulative += magnitudes[bucket]
            values.append(0.0 if bucket == 0 else 2.0 ** (_LOW + (bucket - 0.5) / _PER_OCTAVE))
        return values

    def buckets(self) -> tuple[list[float], list[int]]:
        """Return the upper limits and the counts of the buckets from the first that is not empty to the last."""
        filled = [bucket for bucket in range(_NONFINITE) if self.counts[bucket]]
        if not filled:
            return [], []
        span = range(filled[0], filled[-1] + 1)
        limits = [_limit(bucket) for bucket in span]
        limits[-1] = max(min(limits[-1], self.high), self.low)
        return limits, [self.counts[bucket] for bucket in span]

    def to_json(self) -> dict[str, Any]:
        """Return the figures of a line of `histograms.jsonl`; null where no value is finite.

        Example:
            >>> Distribution.of(*measure(torch.tensor([0.0, 0.0, 3.0, 4.0]))).to_json()["rms"]
            2.5
        """
        count, nonfinite = self.num_finite, self.counts[_NONFINITE]
        if not count:
            return {**dict.fromkeys(("rms", "largest", "zero_share", "quantiles")), "nonfinite": nonfinite}
        return {
            "rms": math.sqrt(self.squares / count),
            "largest": max(abs(self.low), abs(self.high)),
            "zero_share": self.counts[_ZERO] / count,
            "nonfinite": nonfinite,
            "quantiles": self.quantiles(),
        }


def _limit(bucket: int) -> float:
    """Return the upper limit of a bucket."""
    if bucket == _ZERO:
        return 2.0**_LOW / 2
    if bucket > _ZERO:
        return float(2.0 ** (_LOW + (bucket - _ZERO) / _PER_OCTAVE))
    return float(-(2.0 ** (_LOW + (_ZERO - 1 - bucket) / _PER_OCTAVE)))


_log = logging.getLogger(__name__)

FILE: Final = "histograms.jsonl"
"""The file of a run folder with a line for each recorded step."""
KINDS: Final = ("gradients", "activations", "weights")
Kind = Literal["gradients", "activations", "weights"]
_Measured = dict[str, tuple[Tensor, Tensor]]
"""Name -> result of `measure`."""


def observed_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a model that hold no others, by name.

    The output layer that a language model offers is not among them: a step computes its loss without its scores.
    """
    without = offered_by(model)
    inner = {name: module for name, module in model.named_modules() if name and module is not without}
    return {name: module for name, module in inner.items() if not any(module.children())}


class _Recorder:
    """Records the steps that are due; keeps counts on the devices until the step is complete.

    The layers have hooks in such a step alone; other steps run without them.
    """

    def __init__(self, settings: Histograms) -> None:
        self._settings = settings
        self.is_active = False
        """Whether this rank counts: rank 0, and every rank where ranks hold parts."""
        self.modules: Mapping[str, nn.Module] = {}
        """The layers whose outputs are counted here."""
        self.step: int | None = None
        """The step that is being recorded, counted from 0."""
        self.left_out: dict[str, str] = {}
        """Kind -> a message about layers that are not shown."""
        self._results: dict[str, _Measured] = {}
        self._counted: Mapping[str, bool] | None = None
        self._ranks: Collective | None = None
        self._taken = False
        """Whether the step has made an update."""
        self._is_forward = False
        """Whether outputs count: outputs of forward passes do, outputs that backward recomputes do not."""
        self._handles: list[RemovableHandle] = []

    def wants(self, step: int) -> bool:
        """Return whether a step is recorded: the first of a training, and every step whose number is a multiple of
        `every_steps`.
        """
        return self.is_active and (step == 0 or (step + 1) % self._settings.every_steps == 0)

    def on_phase(self, phase: str, step: int) -> None:
        """Start recording when a due step begins; outputs count only in forward passes."""
        if phase == "data":
            self.end()
            self.step = step if self.wants(step) else None
            if self.step is not None:
                hooks = ((module, partial(self._look, name)) for name, module in self.modules.items())
                self._handles = [module.register_forward_hook(hook) for module, hook in hooks]
        elif self.step is not None:
            self._is_forward = phase == "forward"

    def _look(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        """Count the output of a layer; a forward hook."""
        if not self._is_forward or not isinstance(output, Tensor) or not output.is_floating_point():
            return
        (sums, extrema), measured = measure(output), self._results.setdefault("activations", {})
        if name in measured:
            before, ends = measured[name]
            low, high = torch.minimum(extrema[0], ends[0]), torch.maximum(extrema[1], ends[1])
            sums, extrema = sums + before, torch.stack([low, high])
        measured[name] = sums, extrema

    def take(self, step: int, tensors: UpdateTensors) -> None:
        """Count gradients and weights of an update before it is applied."""
        del step
        self._taken, self._counted, self._ranks = True, tensors.counted, tensors.ranks
        for kind, named in (("gradients", tensors.grads), ("weights", tensors.weights)):
            if kind in self._settings.kinds:
                measured = {name: measure(named[name]) for name in self.chosen(kind, named)}
                self._results.setdefault(kind, {}).update(measured)

    def chosen(self, kind: str, names: Iterable[str]) -> list[str]:
        """Return the layers that match a pattern, thinned evenly if there are too many to show."""
        fitting = [name for name in names if any(fnmatchcase(name, pattern) for pattern in self._settings.layers)]
        shown = evenly(fitting, self._settings.most_layers)
        if len(shown) < len(fitting):
            self.left_out[kind] = f"{len(shown)} of {len(fitting)}"
        return shown

    def complete(self) -> dict[str, dict[str, Distribution]]:
        """Return the distributions of the step, by kind and layer; collective where ranks hold parts."""
        results, counted, ranks, taken = self._results, self._counted, self._ranks, self._taken
        self.end()
        if not taken:  # the step was skipped
            return {}
        if counted is not None and ranks is not None:
            parts = {kind: measured for kind, measured in results.items() if kind != "activations"}
            results |= {kind: summed(measured, counted, ranks) for kind, measured in parts.items()}
        return {
            kind: {name: Distribution.of(*pair) for name, pair in results[kind].items()}
            for kind in KINDS
            if kind in results
        }

    def end(self) -> None:
        """Forget the step, and remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self.step, self._results, self._handles = None, {}, []
        self._is_forward = self._taken = False


@dataclass(kw_only=True, eq=False)
class Histograms(Callback):
    """Shows how the values of gradients, activations and weights are distributed, layer by layer, at some steps.

    TensorBoard shows them as histograms and distributions, and the page of the run as a table of the newest ones;
    `histograms.jsonl` has their figures.

    Gradients are those of the mean loss over all shards and replicas, before scaling and clipping. Weights are those
    before the update. Activations are the outputs of the layers that hold no others, for the shards of rank 0.
    Parameters that are frozen have no gradient and are left out. A step that is not recorded runs as without this
    callback; the results of the training do not change.

    A histogram is counted in buckets of a quarter of an octave, from 9e-13 to 1e12. Under `fsdp` each rank counts its
    parts, and the counts are summed over the ranks: a collective call, so an error in this callback ends the run.
    """

    every_steps: Annotated[int, cosmetic, at_least(1), unit("steps")] = 100
    """Steps between two records, counted from the start of the training; the first step is always recorded."""
    kinds: Annotated[tuple[Kind, ...], cosmetic] = KINDS
    """Tensors to show: `gradients`, `activations`, `weights`."""
    layers: Annotated[tuple[str, ...], cosmetic] = ("*",)
    """Patterns of the names of parameters and layers that are shown, `[blocks.0.*, head.*]`."""
    most_layers: Annotated[int, cosmetic, at_least(1), unit("layers")] = 48
    """Parameters or layers of each kind; if there are more, this many are shown at equal distances."""
    _events: EventFolder = field(default_factory=lambda: EventFolder("histograms"), init=False, repr=False)
    _recorder: _Recorder = field(init=False, repr=False)
    _warned: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        self._recorder = _Recorder(self)

    def validate(self, planned: Planned) -> list[Problem]:
        """Return problems: gradients that no listener receives, or nothing to show."""
        strategy, compiled = planned.cfg.strategy["_target_"].rpartition(".")[2], planned.cfg.compile.mode
        problems = []
        if not planned.strategy_facts.shows_gradients:
            rule = f"records gradients under one_device, device_map, mirrored and fsdp, not under {strategy}. "
            problems.append(Problem(key=planned.key, rule=f"{rule}Leave it out."))
        elif compiled != "off" and planned.strategy_facts.compiles_step:
            rule = f"records no gradient with compile.mode={compiled}. Leave it out, or use compile.mode=off."
            problems.append(Problem(key=planned.key, rule=rule))
        elif compiled != "off" and set(self.kinds) == {"activations"}:
            rule = f"shows nothing with compile.mode={compiled}: compiled layers have no hooks. Use compile.mode=off."
            problems.append(Problem(key=f"{planned.key}.kinds", value=list(self.kinds), rule=rule))
        if not self.kinds:
            rule = f"is empty. Name some of {', '.join(KINDS)}, or leave the callback out."
            problems.append(Problem(key=f"{planned.key}.kinds", value=[], rule=rule))
        return problems

    def phase_listener(self) -> PhaseListener:
        """Return the listener that starts a record."""
        return self._recorder.on_phase

    def gradient_listener(self) -> GradientListener:
        """Return the listener that counts gradients and weights."""
        return self._recorder

    def run_start(self, run: Run) -> None:
        """Find the layers; drop the lines of steps that are trained again."""
        recorder = self._recorder
        recorder.is_active = run.is_owner or run.computes_together
        if not run.is_owner:
            return
        if "activations" in self.kinds:
            if run.cfg.compile.mode == "off":
                layers = observed_layers(run.model)
                recorder.modules = {name: layers[name] for name in recorder.chosen("activations", layers)}
            else:
                _log.warning("callbacks=[histograms] leaves out activations: compiled layers have no hooks.")
        keep_until(run.folder / FILE, run.state.step)

    def step_end(self, run: Run, outcome: StepOutcome) -> None:
        """Write a record, if this step is one; this waits for the device."""
        if self._recorder.step is None:
            return
        measured = self._recorder.complete()
        if measured and run.is_owner:
            self._write(run, measured)

    def rolled_back(self, run: Run, step: int) -> None:
        """Drop the records of the steps that are trained again."""
        self._events.restart(run.state.step)
        if run.is_owner:
            keep_until(run.folder / FILE, run.state.step)

    def train_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """Write the buffered events."""
        self._events.close()

    def run_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """Remove the hooks."""
        self._recorder.end()
        self._events.close()

    def _write(self, run: Run, measured: Mapping[str, Mapping[str, Distribution]]) -> None:
        events, step = self._events.of(run), run.state.step
        for kind, named in measured.items():
            for name, distribution in named.items():
                limits, counts = distribution.buckets()
                if limits:
                    ends = (distribution.low, distribution.high, distribution.total, distribution.squares)
                    events.buckets(f"{kind}/{name}", limits, counts, ends=ends, step=step)
        events.flush()
        if not self._warned and self._recorder.left_out:
            self._warned = True
            text = ", ".join(f"{what} of {kind}" for kind, what in self._recorder.left_out.items())
            _log.warning("callbacks=[histograms] shows %s: callbacks.histograms.most_layers is the limit.", text)
        lines = {kind: {name: layer.to_json() for name, layer in named.items()} for kind, named in measured.items()}
        append_rows(run.folder / FILE, [{"step": step, **lines}])


def summed(measured: _Measured, counted: Mapping[str, bool], ranks: Collective) -> _Measured:
    """Sum the measurements of the ranks, each of its part of the tensors; collective.

    Args:
        measured: measurements of this rank; names are the same on every rank.
        counted: whether this rank's part counts.
        ranks: the ranks that hold parts.
    """
    if not measured:
        return {}
    local = [sums * float(counted[name]) for name, (sums, _) in measured.items()]
    total = ranks.sum(torch.stack([tensor.cpu() for tensor in local]))
    ends = torch.stack([extrema.cpu() for _, extrema in measured.values()])
    gathered = torch.stack([tensor.cpu() for tensor in ranks.gather(ends)])
    low, high = gathered[..., 0].amin(0), gathered[..., 1].amax(0)
    return {name: (total[index], torch.stack([low[index], high[index]])) for index, name in enumerate(measured)}
