"""Examine the steps of a candidate, each compared with a plain loop that starts from the candidate's own checkpoint.

The answer uses the words of docs/numbers.md, and claims only what the evidence shows.

The probe: a short training under plain SGD, whose checkpoints give the gradient of every step by name.

SGD with momentum m keeps `b' = m b + g` for each parameter, and every strategy saves the optimizer state under the
canonical name of the parameter. So `g = b' - m b` is the gradient that the optimizer received, under every strategy,
without recording anything during a step. Without momentum, `g = (p - p') / lr`.

The plain loop: forward and backward of each shard of a step, alone, in this process. It uses the model, the objective,
the data and the random keys, and no part of an executor: no accumulation, no packing, no reducer, no division of the
loss, no clipping, no fused kernel. Its sums are the definitions of docs/numbers.md.

A difference is one beyond rounding between one step of a candidate and the plain loop's. Most faults are a ratio: the
factor of each shard in the sum, beside the right one. The others are a permutation of elements, other random numbers,
and an update by another rate, decay or state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from trainkit.cluster.tasks import Identity
from trainkit.config.schema import RunConfig
from trainkit.data.reading.loader import Loader
from trainkit.numerics.batch import Ticket
from trainkit.prove.comparing import ULPS, Comparison
from trainkit.run.begin import RunRequest
from trainkit.run.folder.continued import starting_weights
from trainkit.run.planning.build import make_optimizer, transformed_model
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.run.runner import train
from trainkit.run.session.restore import loader_of, setup_request
from trainkit.strategies.core.buffers import sample_dims_of
from trainkit.strategies.core.optimizer import restore_optimizer_state
from trainkit.strategies.one_device import OneDevice
from trainkit.trainer.checkpoint.tensors import load
from trainkit.trainer.manifest import list_complete

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
        return sorted({self.num_replicas, len(self.shards), sum(shard.replica == 0 for shard in self.shards)} - {0, 1})


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
    means: dict[str, Tensor] = {}
    for name, start in before.items():
        after = [shard.buffers[name] for shard in shards]
        if all(torch.equal(end, start) for end in after):
            means[name] = start
        elif name in per_sample:
            means[name] = start + sum((end - start for end in after), torch.zeros_like(start))
        elif start.is_floating_point():
            means[name] = sum((end * share for end, share in zip(after, weights, strict=True)), torch.zeros_like(start))
        else:
            moved = sum(float((end - start).max()) * share for end, share in zip(after, weights, strict=True))
            means[name] = start + round(moved)
    return means


def distance(left: Tensor, right: Tensor) -> float:
    """Return the norm of a difference, in float64 on the host; NaN or infinite if a tensor is not finite."""
    return float((left.detach().cpu().double() - right.detach().cpu().double()).norm())


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Tensors of one step that differ beyond rounding."""

    step: int
    actual: Tensors
    """The tensors of the candidate that differ."""
    expected: Tensors
    """The same tensors of the plain loop."""
    allowed: Mapping[str, float]
    """The norm of a difference that counts as rounding, by name."""


def differing(step: int, expected: Tensors, actual: Tensors, allowed: Mapping[str, float]) -> Difference | None:
    """Compare the tensors of a step that have a tolerance; None if all are equal up to rounding."""
    wrong = [name for name, tolerance in allowed.items() if not distance(expected[name], actual[name]) <= tolerance]
    actual, expected = ({name: tensors[name] for name in wrong} for tensors in (actual, expected))
    return Difference(step=step, actual=actual, expected=expected, allowed=allowed) if wrong else None


def differing_buffers(step: int, expected: Tensors, actual: Tensors) -> Difference | None:
    """Compare the buffers after a step; None if all are equal up to rounding."""
    allowed = {
        name: ULPS * torch.finfo(buffer.dtype).eps * norm(buffer) if buffer.is_floating_point() else 0.0
        for name, buffer in expected.items()
    }
    return differing(step, expected, actual, allowed)


def differing_parameters(
    step: int, expected: Tensors, *, before: Tensors, actual: Tensors, skipped: Container[str]
) -> Difference | None:
    """Compare the parameters after one update from the same checkpoint; None if all are equal up to rounding.

    `skipped` are parameters without a gradient, whose update is rounding.
    """
    allowed = {
        name: torch.finfo(param.dtype).eps * (COPIES * norm(param) + ULPS * distance(param, before[name]))
        for name, param in expected.items()
        if name not in skipped
    }
    return differing(step, expected, actual, allowed)


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
    replica_weights = [sum(shard.weight for shard in shards if shard.replica == replica) for replica in replicas]
    size, count = sum(shard.size for shard in shards), len(shards)
    if all(shard.weight for shard in shards):
        num_busy = len({shard.replica for shard in shards})
        yield MEAN_OF_MEANS, "", [weight / (shard.weight * count) for shard in shards]
        yield MEAN_OF_MEANS, "of replicas", [weight / (replica_weights[shard.replica] * num_busy) for shard in shards]
        yield MEAN_OF_MEANS, "weighted by samples", [weight * shard.size / (shard.weight * size) for shard in shards]
    for replica in replicas if len(replicas) > 1 else ():
        for factor in {1.0, weight / (replica_weights[replica] or weight)}:
            yield NOT_REDUCED, f"replica {replica}", [factor * (shard.replica == replica) for shard in shards]
    for factor in {2.0, float(len(replicas)), float(count)} - {1.0}:
        yield COUNTED_TWICE, f"{factor:g} times", [factor] * count
        yield AVERAGED, f"{factor:g} times", [1 / factor] * count


def buffer_hypotheses(step: StepEvidence) -> Iterator[Hypothesis]:
    """Yield the buffers that faults predict."""
    shards, whole = step.shards, sum(shard.size for shard in step.shards)
    table = [(BUFFERS_UNWEIGHTED, "", [1.0 / len(shards)] * len(shards))]
    for replica in range(step.num_replicas if step.num_replicas > 1 else 0):
        sizes = [float(shard.size * (shard.replica == replica)) for shard in shards]
        last = max((index for index, size in enumerate(sizes) if size), default=-1)
        shares = [[size / total for size in sizes] for total in {sum(sizes), whole} - {0.0}]
        shares.append([float(index == last) for index in range(len(shards))])
        table += [(BUFFERS_OF_ONE, f"replica {replica}", weights) for weights in shares]
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
            state = {key: slot.clone() for key, slot in self.state.items()}  # it is updated in place
            restore_optimizer_state(optimizer, params, state)
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
    by_replica = ([shard for shard in step.shards if shard.replica == replica] for replica in range(step.num_replicas))
    forms = {"by shard": [[shard] for shard in step.shards], "by replica": [part for part in by_replica if part]}
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
        >>> ones = {"w": torch.ones(2)}
        >>> twos = {"w": torch.ones(2) * 2}
        >>> difference = Difference(step=0, actual=twos, expected=ones, allowed={"w": 1e-6})
        >>> matching = Matching()
        >>> matching.add(difference, [(COUNTED_TWICE, "", twos)])
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
        matched: dict[tuple[Cause, str], Match] = {}
        for cause, form, predicted in hypotheses:
            self.tested.append(cause)
            if (match := _match(difference, form, predicted)) is not None:
                matched[cause, form] = min(match, matched.get((cause, form), match))
        if self.differences:
            before = {key: match for key, match in self._standing.items() if key in matched or key[0] is NOT_REDUCED}
            matched = {key: max(match, matched.get(key, match)) for key, match in before.items()}
        self._standing = matched
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
    for name, actual in difference.actual.items():
        if name not in predicted:
            return None
        allowed, error = difference.allowed[name], distance(predicted[name], actual)
        if not error <= allowed or not distance(predicted[name], difference.expected[name]) > allowed:
            return None
        matches.append(Match(error / (norm(actual) or 1.0), name, difference.step, form))
    return max(matches)


class PlainLoop:
    """A model on one device, and the shards of any step of its training."""

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        task = plan.tasks[0]
        model = transformed_model(plan.cfg, plan.components.strategy, task)  # compiled code draws other numbers
        request = setup_request(plan, Identity.solo(task.device), model)
        self._replica = OneDevice().setup(request).local
        self.params = self._replica.params
        saved = self._replica.model.state_dict()
        self._buffers = {name: buffer for name, buffer in self._replica.model.named_buffers() if name in saved}
        dims = sample_dims_of(self._replica.model)
        self.per_sample = frozenset(name for name, dim in dims.items() if dim is not None)
        """Names of the buffers that hold state per sample."""
        self._loader: Loader | None = None
        self.sparse = False
        """Whether a computed shard gave a sparse gradient."""
        if plan.cfg.init_from is not None:
            self.load(starting_weights(plan.cfg, report=lambda _: None))

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self._replica.model

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of the parameters and buffers, named as a checkpoint names them."""
        params = {f"param/{name}": param.detach().clone() for name, param in self.params.items()}
        return params | {f"buffer/{name}": buffer.clone() for name, buffer in self._buffers.items()}

    def buffers(self) -> dict[str, Tensor]:
        """Return copies of the buffers that a checkpoint holds, by canonical name."""
        return {name: buffer.clone() for name, buffer in self._buffers.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the parameters and buffers of a checkpoint."""
        for name, param in self.params.items():
            param.copy_(tensors[f"param/{name}"])
        for name, buffer in self._buffers.items():
            buffer.copy_(tensors[f"buffer/{name}"])

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Open the data for steps that are requested in ascending order."""
        plan = self.plan
        self._loader = loader_of(plan, self._replica.device, lambda step: tuple(range(plan.batch.num_shards(step))))
        try:
            yield
        finally:
            self._loader.close()
            self._loader = None

    def shards(self, step: int, *, num_replicas: int = 1, shard_of_keys: int | None = None) -> Iterator[Shard]:
        """Yield the results of the shards of a step, from the loaded parameters and buffers.

        Each shard draws its own random numbers, or those of `shard_of_keys`.
        """
        assert self._loader is not None
        plan = self.plan.batch
        batches = self._loader.fetch(Ticket(step, tuple(range(plan.num_shards(step)))))
        before = self.buffers()
        numerics = self.plan.components.numerics
        for shard, batch in enumerate(batches):
            self._restore(before)
            gradient, weight, after = self._shard(step, shard if shard_of_keys is None else shard_of_keys, batch)
            lane = shard % numerics.lanes if numerics.reproducible else shard
            yield Shard(
                gradient=gradient,
                weight=weight,
                size=plan.shard_size(step, shard),
                replica=lane % num_replicas,
                buffers=after,
            )
        self._restore(before)

    def evidence(self, step: int, *, num_replicas: int) -> StepEvidence:
        """Return the evidence of a step, at the loaded parameters and buffers."""
        shards = tuple(self.shards(step, num_replicas=num_replicas))
        return StepEvidence(
            step=step,
            shards=shards,
            num_replicas=num_replicas,
            buffers=self.buffers(),
            strides={name: param.stride() for name, param in self.params.items()},
            drawn_alike=lambda: tuple(self.shards(step, num_replicas=num_replicas, shard_of_keys=0)),
        )

    def _shard(self, step: int, keyed_as: int, batch: Any) -> tuple[dict[str, Tensor], float, dict[str, Tensor]]:
        replica, objective = self._replica, self.plan.components.objective
        replica.keys.enter(step=step, shard=keyed_as, objective=objective)
        loss = objective.loss(replica.model, batch)
        after = self.buffers()
        total = loss.total
        grads = torch.autograd.grad(total, list(self.params.values()), allow_unused=True)
        self.sparse = self.sparse or any(grad is not None and grad.is_sparse for grad in grads)
        dense = {
            name: grad.to_dense() if grad.is_sparse else grad
            for name, grad in zip(self.params, grads, strict=True)
            if grad is not None
        }
        return dense, float(loss.weight), after

    @torch.no_grad()
    def _restore(self, buffers: Mapping[str, Tensor]) -> None:
        for name, buffer in self._buffers.items():
            buffer.data.copy_(buffers[name])


MOMENTUM: Final = 2.0**-10
"""Small, so that the subtracted part is small; a power of two, so that the product is exact."""
_MOVE: Final = 0.01
"""The fraction of the parameters' norm by which the first step of a probe moves them."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The results that points 3 and 4 of the numbers contract derive from the shards of a step."""

    gradient: Tensors
    """The sum over all shards, divided by the total weight."""
    scale: Mapping[str, float]
    """The sum of the norms of the terms of that sum, which bounds its rounding."""
    buffers: Tensors
    """The buffers after the step."""


def add_up(shards: Iterable[Shard], buffers: Tensors, per_sample: Container[str] = ()) -> Expected:
    """Return the expected result of a step; the shards are consumed one at a time.

    Args:
        shards: the shards of the step.
        buffers: the buffers before the step.
        per_sample: names of the buffers that hold state per sample.
    """
    total: dict[str, Tensor] = {}
    scale: dict[str, float] = {}
    consumed: list[Shard] = []
    for shard in shards:
        for name, gradient in shard.gradient.items():
            total[name] = total[name] + gradient if name in total else gradient
            scale[name] = scale.get(name, 0.0) + float(gradient.norm())
        consumed.append(replace(shard, gradient={}))
    weight = sum(shard.weight for shard in consumed) or 1.0
    size = sum(shard.size for shard in consumed)
    return Expected(
        gradient={name: gradient / weight for name, gradient in total.items()},
        scale={name: value / weight for name, value in scale.items()},
        buffers=averaged_buffers(consumed, [shard.size / size for shard in consumed], buffers, per_sample),
    )


def differing_gradients(
    step: int, expected: Expected, actual: Tensors, *, errors: dict[str, float], read_from: Tensors | None, rate: float
) -> Difference | None:
    """Compare the gradients of a step; None if all are equal up to rounding.

    Args:
        step: the step.
        expected: the result of the plain loop.
        actual: the gradients of the candidate.
        errors: mapping that receives the relative error of each parameter.
        read_from: the parameters whose difference gave the gradient; None: the gradient itself was saved.
        rate: the learning rate that this difference was divided by.
    """
    least = NO_GRADIENT * math.hypot(*expected.scale.values())
    full = {name: expected.gradient.get(name, torch.zeros_like(grad)) for name, grad in actual.items()}
    allowed: dict[str, float] = {}
    for name, grad in actual.items():
        scale, epsilon = expected.scale.get(name, 0.0), torch.finfo(grad.dtype).eps
        read = 0.0 if read_from is None else 4 * epsilon * norm(read_from[f"param/{name}"]) / rate
        allowed[name] = max(ULPS * epsilon * scale, least) + read
        error = distance(full[name], grad)
        errors[name] = error / (scale if scale > least else least / NO_GRADIENT) if error else 0.0
    return differing(step, full, actual, allowed)


def probe_rate(expected: Expected, params: Iterable[Tensor]) -> float:
    """Return the probe's learning rate: a power of two that moves the parameters by a hundredth in the first step."""
    gradient = math.hypot(*(float(grad.norm()) for grad in expected.gradient.values()))
    size = math.hypot(*(float(param.detach().norm()) for param in params))
    if not (gradient > 0 and size > 0 and math.isfinite(gradient)):
        return 1.0
    return float(2.0 ** math.floor(math.log2(_MOVE * size / gradient)))


def probe_config(cfg: RunConfig, *, rate: float, momentum: float = MOMENTUM, first: float = 1.0) -> RunConfig:
    """Return the config with plain SGD at a constant rate: no decay, clipping or warmup.

    Args:
        cfg: the config.
        rate: the learning rate.
        momentum: of SGD.
        first: factor on the rate of the first step.
    """
    fused = {"fused": True} if cfg.optimizer.get("fused") else {}
    optimizer = {"_target_": "torch.optim.SGD", "lr": rate, "momentum": momentum, **fused}
    return replace(
        cfg,
        optimizer=optimizer,
        schedule={"_target_": "trainkit.schedules.RateRange", "first": first, "last": 1.0, "steps": 2},
        clip=replace(cfg.clip, max_norm=None),
        warmup=replace(cfg.warmup, steps=None, epochs=None),
        lr_scaling=replace(cfg.lr_scaling, reference_batch=None),
    )


def transitions(
    folder: Path, initial: Mapping[str, Tensor]
) -> Iterator[tuple[int, Mapping[str, Tensor], Mapping[str, Tensor]]]:
    """Yield (step, tensors before it, tensors after it) of every step between two checkpoints of a run."""
    before, updates = initial, 0
    for checkpoint in sorted(list_complete(folder / "checkpoints"), key=lambda checkpoint: checkpoint.step):
        after = load(checkpoint.folder).tensors
        if checkpoint.step == updates + 1:
            yield updates, before, after
        before, updates = after, checkpoint.step


def gradient_between(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], names: Iterable[str], *, rate: float
) -> Tensors:
    """Return the gradient that the optimizer of a probe received between two checkpoints.

    Example:
        >>> before = {"param/w": torch.tensor([1.0])}
        >>> after = {"param/w": torch.tensor([0.5]), "optimizer/momentum_buffer/w": torch.tensor([2.0])}
        >>> gradient_between(before, after, ["w"], rate=0.25)["w"].tolist()
        [2.0]
        >>> gradient_between(before, {"param/w": torch.tensor([0.5])}, ["w"], rate=0.25)["w"].tolist()
        [2.0]
    """
    keeps = any(key.startswith("optimizer/momentum_buffer/") for key in after)
    gradient: dict[str, Tensor] = {}
    for name in names:
        slot = f"optimizer/momentum_buffer/{name}"
        if slot in after:
            buffer = after[slot]
            gradient[name] = buffer - MOMENTUM * before[slot] if slot in before else buffer
        elif keeps:  # a parameter without a gradient has no slot
            gradient[name] = torch.zeros_like(after[f"param/{name}"])
        else:
            gradient[name] = (before[f"param/{name}"] - after[f"param/{name}"]) / rate
    return gradient


_STEPS: Final = 3
"""Number of differing steps on which hypotheses are tested."""


@dataclass
class Probed:
    """The results of probing a candidate."""

    errors: dict[str, float] = field(default_factory=dict)
    """Parameter -> the largest error of its gradient, divided by the norms of the shards' gradients."""
    first: dict[str, int] = field(default_factory=dict)
    """Parameter -> the first update whose gradient differs beyond rounding."""
    gradients: Matching = field(default_factory=Matching)
    """The causes of differing gradients."""
    buffers: Matching = field(default_factory=Matching)
    """The causes of differing buffers."""
    difference: Difference | None = None
    """The gradients that differ in the first step in which some do."""
    begins: Comparison | None = None
    """The first initial weight whose bits differ, or the last weight; None: not compared."""

    @property
    def comparisons(self) -> list[Comparison]:
        """The comparison of each gradient."""
        return [
            Comparison(
                name=f"gradient/{name}",
                verdict="different" if name in self.first else "rounding" if error else "equal",
                error=error,
                first_step=self.first.get(name),
            )
            for name, error in self.errors.items()
        ]

    @property
    def differs(self) -> bool:
        """Whether a gradient or a buffer of a step differs from the plain loop's."""
        return bool(self.gradients.differences or self.buffers.differences)


class Examiner:
    """Compares candidates with a plain loop at the common cut, in the precision that is used."""

    def __init__(self, reference: RunConfig) -> None:
        self._plan = make_plan(reference)
        self._loop = loop = PlainLoop(self._plan)
        self._initial = {name: tensor.cpu() for name, tensor in loop.tensors().items()}  # as those of a checkpoint
        with loop.reading():
            first = add_up(loop.shards(0), loop.buffers())
        self._rate = probe_rate(first, loop.params.values())
        least = NO_GRADIENT * math.hypot(*map(norm, first.gradient.values()))
        self.without_gradient = frozenset(name for name in loop.params if norm(first.gradient.get(name)) < least)
        """The parameters whose gradient in the first step is zero except for rounding."""
        masks = {name: (grad.abs() < least).cpu() for name, grad in first.gradient.items()}
        self.elements_without_gradient: dict[str, Tensor] = {
            name: mask for name, mask in masks.items() if name not in self.without_gradient and mask.any()
        }
        """Mask of the elements whose gradient is zero except for rounding, on the host; only for parameters where
        others are not.
        """

    def probe(self, candidate: RunConfig, *, num_replicas: int, folder: Path, begins: bool = False) -> Probed:
        """Train a candidate a few steps under plain SGD, and compare every step's gradients and buffers.

        Args:
            candidate: its config.
            num_replicas: its replicas.
            folder: a new folder.
            begins: compare the initial weights as well, bit by bit, by a first step with rate 0; sparse gradients,
                which are read from the move of the weights, leave it out.
        """
        loop, sparse, probed = self._loop, self._loop.sparse, Probed()
        begins = begins and not sparse
        momentum, first = 0.0 if sparse else MOMENTUM, 0.0 if begins else 1.0
        cfg = probe_config(candidate, rate=self._rate, momentum=momentum, first=first)
        train(RunRequest(cfg=cfg, run_dir=folder))
        with loop.reading():
            for step, before, after in transitions(folder, self._initial):
                if begins and step == 0:
                    probed.begins = bitwise(_below(self._initial, "param/"), _below(after, "param/"))
                loop.load(before)
                expected = add_up(loop.shards(step), loop.buffers(), loop.per_sample)
                actual, errors = gradient_between(before, after, loop.params, rate=self._rate), dict[str, float]()
                read_from = before if sparse else None
                wrong = differing_gradients(step, expected, actual, errors=errors, read_from=read_from, rate=self._rate)
                for name, error in errors.items():
                    probed.errors[name] = max(probed.errors.get(name, 0.0), error)
                for name in () if wrong is None else wrong.actual:
                    probed.first.setdefault(name, step + 1)
                probed.difference = probed.difference or wrong
                of_gradients = partial(gradient_hypotheses, rate_is_apart=not sparse)
                moved = differing_buffers(step, expected.buffers, _below(after, "buffer/"))
                for matching, difference, hypotheses in (
                    (probed.gradients, wrong, of_gradients),
                    (probed.buffers, moved, buffer_hypotheses),
                ):
                    if difference is not None and matching.differences < _STEPS:
                        matching.add(difference, hypotheses(loop.evidence(step, num_replicas=num_replicas)))
        return probed

    def replay(self, *, num_replicas: int, folder: Path) -> Matching:
        """Repeat each step of a candidate's own training from its checkpoint, and test why a step differs."""
        matching, cfg, loop = Matching(), self._plan.cfg, self._loop
        with loop.reading():
            for step, before, after in transitions(folder, self._initial):
                loop.load(before)
                evidence = loop.evidence(step, num_replicas=num_replicas)
                state = {key: before[key] for key in before if key.startswith("optimizer/")}
                factor = self._plan.rate.factor(step)
                replay = Replay(cfg=cfg, model=loop.model, params=loop.params, state=state, factor=factor)
                wrong = differing_parameters(
                    step,
                    replay.step(clipped(evidence.gradient, cfg.clip.max_norm)),
                    before=_below(before, "param/"),
                    actual=_below(after, "param/"),
                    skipped=self.without_gradient,
                )
                if wrong is not None:
                    matching.add(wrong, update_hypotheses(evidence, replay))
                if matching.differences == _STEPS:
                    break
        return matching


def bitwise(expected: Tensors, actual: Tensors) -> Comparison:
    """Return the comparison of the first tensor whose bits differ, or of the last one.

    Example:
        >>> bitwise({"w": torch.ones(2)}, {"w": torch.tensor([1.0, 1.5])})
        Comparison(name='initial/w', verdict='different', error=0.35..., first_step=0, no_gradient=False)
    """
    for name, tensor in expected.items():
        if not torch.equal(tensor, actual[name]):
            error = distance(tensor, actual[name]) / (norm(tensor) or 1.0)
            return Comparison(name=f"initial/{name}", verdict="different", error=error, first_step=0)
    return Comparison(name=f"initial/{name}", verdict="equal", error=0.0, first_step=None)


def ratio_of(difference: Difference, sizes: Mapping[str, int]) -> str:
    """Say by which number the first differing tensor differs from the plain loop's, and which axes have that size.

    Example:
        >>> single, double = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([2.0, 4.0])}
        >>> ratio_of(Difference(step=0, actual=double, expected=single, allowed={"w": 1e-6}), {"shard": 1, "tensor": 2})
        'gradient/w of step 1 is exactly 2 times that of one device, the size of tensor'
    """
    name, actual = next(iter(difference.actual.items()))
    expected, allowed = difference.expected[name].double(), difference.allowed[name]
    actual = actual.double()
    subject = f"gradient/{name} of step {difference.step + 1}"
    ratio = float((actual * expected).sum() / (expected * expected).sum()) if norm(expected) else math.nan
    if distance(actual, expected * ratio) <= allowed * max(abs(ratio), 1.0):
        whole = ratio if abs(ratio) >= 1 else 1 / ratio if ratio else 0.0
        nearest = round(whole)
        if not math.isclose(whole, nearest, rel_tol=1e-9):
            return f"{subject} is {ratio:.6g} times that of one device"
        axes = " and of ".join(axis for axis, size in sizes.items() if size == nearest > 1)
        text = f"{nearest}" if abs(ratio) >= 1 or not nearest else f"1/{nearest}"
        return f"{subject} is exactly {text} times that of one device" + (f", the size of {axes}" if axes else "")
    ordered = [tensor.flatten().sort().values for tensor in (actual, expected)]
    if distance(*ordered) <= allowed:
        return f"{subject} has the elements of that of one device, permuted"
    error = distance(actual, expected) / norm(expected)
    return f"{subject} is no multiple of that of one device: relative error {error:.2g}"


def _below(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    return {key.removeprefix(prefix): tensors[key] for key in tensors if key.startswith(prefix)}


def explain_probe(probed: Probed) -> list[str]:
    """Return lines about differing gradients and about differing buffers."""
    return [*_lines(probed.gradients, "gradient"), *_lines(probed.buffers, "buffer")]


def explain_updates(updates: Matching) -> list[str]:
    """Return lines about differing updates whose gradients equal those of the plain loop."""
    state = (
        "not explained: every gradient, and every step taken alone from the candidate's own checkpoint, equals that of "
        "a plain loop; the difference is in state that a checkpoint does not hold"
    )
    return [*_lines(updates, "param")] or [state]


ORDERED: Final = f"explained by: {ORDER.named} ({ORDER.page})"
"""The line for numbers that are equal only up to rounding although equal bits are promised."""


def _lines(matching: Matching, kind: str) -> Iterator[str]:
    lines = [
        f"{cause.named}; {kind}/{match.name} of step {match.step + 1} fits this to {match.error:.1g}"
        f"{f' ({match.form})' if match.form else ''} ({cause.page})"
        for cause, match in matching.matches.items()
    ]
    if len(lines) == 1:
        yield f"explained by: {lines[0]}"
    elif lines:
        yield "explained by one of these, which the numbers cannot distinguish:"
        yield from (f"  {line}" for line in lines)
    elif matching.differences:
        wrong = {"gradient": "gradients", "buffer": "buffers", "param": "updates, from correct gradients,"}[kind]
        yield f"not explained: the {wrong} differ from a plain loop's in a way that no known fault explains; ruled out:"
        yield f"  {'; '.join(dict.fromkeys(cause.words for cause in matching.tested))}"
