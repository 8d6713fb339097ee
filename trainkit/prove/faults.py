"""The faults that a diagnosis can name: what each makes of the shards of a step, and which one reproduces a difference.

A difference is one beyond rounding between one step of a candidate and the plain loop's. Most faults are a ratio: the
factor of each shard in the sum, beside the right one. The others are a permutation of elements, other random numbers,
and an update by another rate, decay or state.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from trainkit.config.schema import RunConfig
from trainkit.prove.comparing import ULPS
from trainkit.run.planning.build import make_optimizer
from trainkit.strategies.core.optimizer import restore_optimizer_state

Tensors = Mapping[str, Tensor]
"""Tensors by the canonical name of their parameter or buffer."""
COPIES: Final = 8.0
"""Additional tolerance for an update, in units in the last place of the parameter: it is rounded a few times."""
NO_GRADIENT: Final = 1e-12
"""A gradient below this fraction of the model's is zero except for rounding; AdamW turns such rounding into full
steps.
"""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The results of forward and backward of one shard, started from the parameters and buffers of its step."""

    gradient: Tensors
    """The gradient of the summed loss, for parameters that received one."""
    weight: float
    """The number of targets that the loss counts."""
    size: int
    """The number of samples."""
    replica: int = 0
    """The replica of the candidate that computes this shard."""
    buffers: Tensors = field(default_factory=dict)
    """The buffers after the forward pass."""


@dataclass(frozen=True, kw_only=True)
class StepEvidence:
    """All data that a hypothesis about one step may use."""

    step: int
    shards: Sequence[Shard]
    num_replicas: int = 1
    buffers: Tensors = field(default_factory=dict)
    """The buffers before the step."""
    strides: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The strides of every parameter."""
    drawn_alike: Callable[[], Sequence[Shard]] | None = None
    """Compute the shards with the random numbers of shard 0; None if nothing draws."""

    @property
    def weight(self) -> float:
        """The number of targets of the step."""
        return sum(shard.weight for shard in self.shards)

    @property
    def gradient(self) -> dict[str, Tensor]:
        """The gradient as point 3 of the contract defines it."""
        return combine(self.shards, [1.0 / self.weight] * len(self.shards))

    @property
    def counts(self) -> list[int]:
        """The numbers by which a sum, a rate or a decay may be multiplied by mistake: of replicas, of shards."""
        return sorted({self.num_replicas, len(self.shards), sum(one.replica == 0 for one in self.shards)} - {0, 1})


def combine(shards: Sequence[Shard], factors: Sequence[float]) -> dict[str, Tensor]:
    """Return the sum of the gradients of some shards, each multiplied by its factor.

    Example:
        >>> shards = [Shard(gradient={"w": torch.tensor([value])}, weight=1.0, size=1) for value in (1.0, 2.0)]
        >>> combine(shards, [1.0, 0.5])["w"].tolist()
        [2.0]
    """
    total: dict[str, Tensor] = {}
    for shard, factor in zip(shards, factors, strict=True):
        for name, gradient in shard.gradient.items():
            term = gradient * factor
            total[name] = total[name] + term if name in total else term
    return total


def averaged_buffers(
    shards: Sequence[Shard], weights: Sequence[float], before: Tensors, per_sample: Container[str] = ()
) -> dict[str, Tensor]:
    """Return the average of the buffers of shards; a counter advances by the average of its advances, and state per
    sample by the changes of all shards.
    """
    found: dict[str, Tensor] = {}
    for name, start in before.items():
        after = [shard.buffers[name] for shard in shards]
        if all(torch.equal(one, start) for one in after):
            found[name] = start
        elif name in per_sample:
            found[name] = start + sum((one - start for one in after), torch.zeros_like(start))
        elif start.is_floating_point():
            found[name] = sum((one * share for one, share in zip(after, weights, strict=True)), torch.zeros_like(start))
        else:
            moved = sum(float((one - start).max()) * share for one, share in zip(after, weights, strict=True))
            found[name] = start + round(moved)
    return found


def distance(one: Tensor, other: Tensor) -> float:
    """Return the norm of a difference, in float64 on the host; NaN or infinite if a tensor is not finite."""
    return float((one.detach().cpu().double() - other.detach().cpu().double()).norm())


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Tensors of one step that differ beyond rounding."""

    step: int
    found: Tensors
    """The tensors of the candidate that differ."""
    expected: Tensors
    """The same tensors of the plain loop."""
    allowed: Mapping[str, float]
    """The norm of a difference that counts as rounding, by name."""


def differing(step: int, expected: Tensors, found: Tensors, allowed: Mapping[str, float]) -> Difference | None:
    """Compare the tensors of a step that have a tolerance; None if all are equal up to rounding."""
    wrong = [name for name, most in allowed.items() if not distance(expected[name], found[name]) <= most]
    kept = [{name: one[name] for name in wrong} for one in (found, expected)]
    return Difference(step=step, found=kept[0], expected=kept[1], allowed=allowed) if wrong else None


def differing_buffers(step: int, expected: Tensors, found: Tensors) -> Difference | None:
    """Compare the buffers after a step; None if all are equal up to rounding."""
    units = {name: ULPS * torch.finfo(one.dtype).eps for name, one in expected.items() if one.is_floating_point()}
    return differing(step, expected, found, {name: units.get(name, 0.0) * norm(one) for name, one in expected.items()})


def differing_parameters(
    step: int, expected: Tensors, *, before: Tensors, found: Tensors, skipped: Container[str]
) -> Difference | None:
    """Compare the parameters after one update from the same checkpoint; None if all are equal up to rounding.

    `skipped` are parameters without a gradient, whose update is rounding.
    """
    allowed = {
        name: torch.finfo(one.dtype).eps * (COPIES * norm(one) + ULPS * distance(one, before[name]))
        for name, one in expected.items()
        if name not in skipped
    }
    return differing(step, expected, found, allowed)


def norm(tensor: Tensor | None) -> float:
    """Return the norm of a tensor, 0 for None."""
    return 0.0 if tensor is None else float(tensor.detach().double().norm())


class Cause(NamedTuple):
    """A fault, described in words."""

    rule: int
    """The point of docs/numbers.md that it breaks."""
    words: str

    @property
    def named(self) -> str:
        """The rule by number and name, and the fault."""
        return f"rule {self.rule} ({_TITLES[self.rule]}): {self.words}"

    @property
    def page(self) -> str:
        """The page and anchor that define the rule."""
        return f"docs/numbers.md#{self.rule}-{_TITLES[self.rule].replace(' ', '-')}"


_TITLES: Final = {3: "gradient", 4: "randomness and buffers", 5: "order of summation", 6: "learning rate"}
MEAN_OF_MEANS: Final = Cause(3, "the mean of the shards' means")
NOT_REDUCED: Final = Cause(3, "the gradient of one replica, not added to that of the others")
COUNTED_TWICE: Final = Cause(3, "the sum of the gradients, added up again")
AVERAGED: Final = Cause(3, "the average of the shards' gradients instead of their sum")
LAYOUT: Final = Cause(3, "the memory of the gradient is read as contiguous, against the parameter's strides")
CLIPPED_APART: Final = Cause(3, "gradients clipped before they are added up")
NOT_CLIPPED: Final = Cause(3, "the gradient is not clipped")
DRAWN_ALIKE: Final = Cause(4, "random numbers are keyed without the shard: every shard draws those of shard 0")
BUFFERS_OF_ONE: Final = Cause(4, "the buffers of one replica, not averaged with those of the others")
BUFFERS_UNWEIGHTED: Final = Cause(4, "the buffers of shards averaged with equal weights, not by their samples")
ORDER: Final = Cause(5, "numerics.reproducible=true promises equal bits, and they are equal to rounding only")
RATE: Final = Cause(6, "the learning rate is multiplied or divided by the number of replicas or shards")
DECAY_PER_SHARD: Final = Cause(6, "weight decay acts once per shard or once per replica instead of once per step")
NOT_DECAYED: Final = Cause(6, "weight decay does not act")
STATE_LOST: Final = Cause(6, "the optimizer forgets its state between steps")

Hypothesis = tuple[Cause, str, Tensors]
"""(cause, its form, the predicted tensors); several forms of one cause count as one answer."""


def gradient_hypotheses(step: StepEvidence, *, rate_is_apart: bool = True) -> Iterator[Hypothesis]:
    """Yield the gradients that faults predict.

    Unless `rate_is_apart`, gradients were computed from an update, which a wrong learning rate changes as well.
    """
    true, shards = step.gradient, step.shards
    for cause, form, ratios in _ratios(step):
        predicted = combine(shards, [ratio / step.weight for ratio in ratios])
        yield cause, form, predicted
        if cause in (COUNTED_TWICE, AVERAGED) and not rate_is_apart:
            yield RATE, form, predicted
    yield LAYOUT, "", _misread(true, step)
    if step.drawn_alike is not None:
        yield DRAWN_ALIKE, "", combine(step.drawn_alike(), [1.0 / step.weight] * len(shards))


def _ratios(step: StepEvidence) -> Iterator[tuple[Cause, str, list[float]]]:
    """Yield the table of ratios: (cause, its form, the factor of each shard's gradient divided by the right one)."""
    shards, replicas, weight = step.shards, range(step.num_replicas), step.weight
    own = [sum(one.weight for one in shards if one.replica == replica) for replica in replicas]
    size, count = sum(shard.size for shard in shards), len(shards)
    if all(shard.weight for shard in shards):
        parts = len({shard.replica for shard in shards})
        yield MEAN_OF_MEANS, "", [weight / (one.weight * count) for one in shards]
        yield MEAN_OF_MEANS, "of replicas", [weight / (own[one.replica] * parts) for one in shards]
        yield MEAN_OF_MEANS, "weighted by samples", [weight * one.size / (one.weight * size) for one in shards]
    for replica in replicas if len(replicas) > 1 else ():
        for factor in {1.0, weight / (own[replica] or weight)}:
            yield NOT_REDUCED, f"replica {replica}", [factor * (one.replica == replica) for one in shards]
    for factor in {2.0, float(len(replicas)), float(count)} - {1.0}:
        yield COUNTED_TWICE, f"{factor:g} times", [factor] * count
        yield AVERAGED, f"{factor:g} times", [1 / factor] * count


def buffer_hypotheses(step: StepEvidence) -> Iterator[Hypothesis]:
    """Yield the buffers that faults predict."""
    shards, whole = step.shards, sum(one.size for one in step.shards)
    table = [(BUFFERS_UNWEIGHTED, "", [1.0 / len(shards)] * len(shards))]
    for replica in range(step.num_replicas if step.num_replicas > 1 else 0):
        sizes = [float(one.size * (one.replica == replica)) for one in shards]
        last = max((place for place, size in enumerate(sizes) if size), default=-1)
        shares = [[size / total for size in sizes] for total in {sum(sizes), whole} - {0.0}]
        shares.append([float(place == last) for place in range(len(shards))])
        table += [(BUFFERS_OF_ONE, f"replica {replica}", one) for one in shares]
    for cause, form, weights in table:
        yield cause, form, averaged_buffers(shards, weights, step.buffers)


def _misread(gradient: Tensors, step: StepEvidence) -> dict[str, Tensor]:
    return {name: read_as_contiguous(grad, step.strides[name]) for name, grad in gradient.items()}


def read_as_contiguous(gradient: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return the gradient as applied by a kernel that reads a contiguous gradient in the memory order of its parameter;
    unchanged if the strides do not cover one memory range.

    Example:
        >>> read_as_contiguous(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), (1, 2)).tolist()
        [[1.0, 3.0], [2.0, 4.0]]
    """
    last = sum((size - 1) * stride for size, stride in zip(gradient.shape, strides, strict=True))
    if gradient.numel() == 0 or last + 1 != gradient.numel():
        return gradient
    return gradient.contiguous().as_strided(gradient.shape, strides)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """One step of the user's optimizer from a checkpoint, repeated for each hypothesis.

    The optimizer is torch's own loop over parameters: neither a fused kernel nor a sharded state.
    """

    cfg: RunConfig
    model: nn.Module
    """Used to find the modules that own the parameters, for the groups of the optimizer."""
    params: Mapping[str, nn.Parameter]
    """The parameters before the step; copies are updated."""
    state: Mapping[str, Tensor]
    """The tensors of the checkpoint, of which `optimizer/...` is used."""
    factor: float
    """The ratio of the step's learning rate to the base rate."""

    def step(
        self, gradient: Tensors, *, rate: float = 1.0, decay: float = 1.0, times: int = 1, forgets: bool = False
    ) -> Tensors:
        """Return the parameters after a step.

        Args:
            gradient: the gradient for the optimizer.
            rate: multiplies the learning rate.
            decay: multiplies the weight decay.
            times: number of decoupled decays of the parameters, including that of the optimizer.
            forgets: start with an empty state.
        """
        params = {name: nn.Parameter(param.detach().clone()) for name, param in self.params.items()}
        plain: dict[str, Any] = {key: False for key in ("fused", "foreach") if key in self.cfg.optimizer}
        cfg = replace(self.cfg, optimizer={**self.cfg.optimizer, **plain})
        optimizer = make_optimizer(cfg, self.model)(params)
        if not forgets:
            own = {key: slot.clone() for key, slot in self.state.items()}  # it is updated in place
            restore_optimizer_state(optimizer, params, own)
        for group in optimizer.param_groups:
            group["lr"] = float(group["lr"]) * self.factor * rate
            if "weight_decay" in group:
                group["weight_decay"] *= decay
                with torch.no_grad():
                    for param in group["params"]:
                        param.mul_((1.0 - group["lr"] * group["weight_decay"]) ** (times - 1))
        for name, param in params.items():
            if name in gradient:
                param.grad = torch.empty_like(param).copy_(gradient[name])  # with the strides of its parameter
        optimizer.step()
        return {name: param.detach() for name, param in params.items()}


def clipped(gradient: Tensors, max_norm: float | None) -> Tensors:
    """Return gradients scaled down to a global norm, as torch does it.

    Example:
        >>> clipped({"w": torch.tensor([3.0, 4.0])}, 1.0)["w"]
        tensor([0.6000, 0.8000])
    """
    if max_norm is None:
        return gradient
    whole = torch.stack([grad.norm() for grad in gradient.values()]).norm()
    factor = torch.clamp(max_norm / (whole + 1e-6), max=1.0)
    return {name: grad * factor for name, grad in gradient.items()}


def update_hypotheses(step: StepEvidence, replay: Replay) -> Iterator[Hypothesis]:
    """Yield the parameters after the step that faults predict."""
    max_norm = replay.cfg.clip.max_norm
    gradient = clipped(step.gradient, max_norm)
    if max_norm is not None:
        yield NOT_CLIPPED, "", replay.step(step.gradient)
        for form, early in _clipped_apart(step, max_norm):
            yield CLIPPED_APART, form, replay.step(early)
            yield CLIPPED_APART, form, replay.step(clipped(early, max_norm))
    for count in step.counts:
        yield RATE, f"times {count}", replay.step(gradient, rate=float(count))
        yield RATE, f"over {count}", replay.step(gradient, rate=1.0 / count)
        yield DECAY_PER_SHARD, f"{count} times", replay.step(gradient, decay=float(count))
        yield DECAY_PER_SHARD, f"{count} times", replay.step(gradient, times=count)
    yield NOT_DECAYED, "", replay.step(gradient, decay=0.0)
    yield STATE_LOST, "", replay.step(gradient, forgets=True)
    yield LAYOUT, "", replay.step(_misread(gradient, step))


def _clipped_apart(step: StepEvidence, max_norm: float) -> Iterator[tuple[str, Tensors]]:
    """Yield the sums of gradients that were clipped by shard and by replica, as shares of the sum and as means."""
    by_replica = ([one for one in step.shards if one.replica == replica] for replica in range(step.num_replicas))
    forms = {"by shard": [[one] for one in step.shards], "by replica": [part for part in by_replica if part]}
    for form, parts in forms.items():
        weights = [sum(shard.weight for shard in part) or step.weight for part in parts]
        for divisors in [[step.weight] * len(parts), weights] if len(parts) > 1 else []:
            small = [
                Shard(gradient=clipped(combine(part, [1 / divisor] * len(part)), max_norm), weight=1, size=1)
                for part, divisor in zip(parts, divisors, strict=True)
            ]
            yield form, combine(small, [divisor / step.weight for divisor in divisors])


class Match(NamedTuple):
    """A prediction that equals the candidate's tensors up to rounding."""

    error: float
    """The largest relative error of a tensor."""
    name: str
    """That tensor."""
    step: int
    form: str


@dataclass
class Matching:
    """Keeps the causes that have reproduced every difference so far.

    Example:
        >>> one = {"w": torch.ones(2)}
        >>> two = {"w": torch.ones(2) * 2}
        >>> matching = Matching()
        >>> matching.add(Difference(step=0, found=two, expected=one, allowed={"w": 1e-6}), [(COUNTED_TWICE, "", two)])
        >>> [cause.rule for cause in matching.matches]
        [3]
    """

    differences: int = 0
    """Steps that differ and were tested."""
    tested: list[Cause] = field(default_factory=list)
    """Every cause that was tested."""
    _standing: dict[tuple[Cause, str], Match] = field(default_factory=dict)

    def add(self, difference: Difference, hypotheses: Iterable[Hypothesis]) -> None:
        """Test hypotheses on the differences of one more step."""
        found: dict[tuple[Cause, str], Match] = {}
        for cause, form, predicted in hypotheses:
            self.tested.append(cause)
            if (match := _match(difference, form, predicted)) is not None:
                found[cause, form] = min(match, found.get((cause, form), match))
        if self.differences:
            before = {key: one for key, one in self._standing.items() if key in found or key[0] is NOT_REDUCED}
            found = {key: max(one, found.get(key, one)) for key, one in before.items()}
        self._standing = found
        self.differences += 1

    @property
    def matches(self) -> dict[Cause, Match]:
        """The best match of each cause that reproduces every difference.

        Replicas that are not reduced diverge after the first step, so that no later step can be predicted.
        """
        best: dict[Cause, Match] = {}
        for (cause, _), match in self._standing.items():
            best[cause] = min(match, best.get(cause, match))
        return best


def _match(difference: Difference, form: str, predicted: Tensors) -> Match | None:
    """Return the match if a prediction fits all differences, and differs from the expected tensors."""
    matches = []
    for name, found in difference.found.items():
        if name not in predicted:
            return None
        allowed, off = difference.allowed[name], distance(predicted[name], found)
        if not off <= allowed or not distance(predicted[name], difference.expected[name]) > allowed:
            return None
        matches.append(Match(off / (norm(found) or 1.0), name, difference.step, form))
    return max(matches)
