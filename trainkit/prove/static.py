"""Prove which ranks sum each gradient, and how often, without training: `trainkit prove --static --world N`.

One step of every set of axes is traced without data at sizes 2 and 4, on the first rank of each stage, in a process
group without other ranks. What happened to each gradient is compared with what the axes demand. Order and count are
proven, not values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, pairwise, product
from math import ceil, prod
from typing import Any, Final, Literal

from torch import nn
from typing_extensions import TypedDict

from trainkit.config.schema import RunConfig
from trainkit.errors import ConfigError, Problem, named_first_line
from trainkit.prove.layouts import AXES, mesh_text
from trainkit.prove.proving import bare, on_one_device
from trainkit.run.estimates.fake_run import ObservedSteps, observe
from trainkit.run.estimates.gradient_story import Event, Story
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.strategies.core.step import LossDivisor
from trainkit.strategies.mesh.sharding import Axes
from trainkit.strategies.mesh.tensor_plan import MatchedPlan, match_plan
from trainkit.trained.build import meta_model

_DATA: Final = ("replicate", "shard", "context")
"""The axes over which each gradient is summed once."""
_MICRO: Final = 2
"""Samples of a shard: batch normalisation refuses one."""
_SHARDS: Final = 2
"""Shards of each replica, so that sums over shards are seen, too."""
Verdict = Literal["proven", "refused", "wrong", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What the first rank of each stage of a mesh did in a step."""

    axes: Axes
    plan: RunPlan
    model: nn.Module
    stories: Mapping[int, Story]
    """Rank -> its story."""
    steps: Mapping[int, ObservedSteps]
    divisor: LossDivisor
    """By which the loss of the observed step is divided before backward."""

    @cached_property
    def fit(self) -> MatchedPlan:
        """The modules that are cut along tensor."""
        return match_plan(self.model, self.plan.cfg.strategy.get("plan", "auto"), self.axes.tensor)

    @property
    def seeds(self) -> frozenset[float | None]:
        """The factors with which losses begin backward, times the divisor; None: one is unknown."""
        factors = (seed for story in self.stories.values() for seed in story.seeds)
        return frozenset(None if seed is None else float(f"{seed * self.divisor.value:.12g}") for seed in factors)


@dataclass(frozen=True, kw_only=True)
class SetProof:
    """The proof of a set of axes."""

    axes: tuple[str, ...]
    sizes: list[dict[str, int]] = field(default_factory=list)
    """The meshes that were traced."""
    gradients: int = 0
    """Gradients that were read, on all traced ranks."""
    num_bytes: dict[str, list[int]] = field(default_factory=dict)
    """Axes, joined by + -> bytes of gradients that the first rank sums over them in a step, at each traced mesh."""
    findings: list[str] = field(default_factory=list)
    unknown: str | None = None
    """Why it could not be read."""
    refused: str | None = None
    """Why the strategy does not take it."""

    @property
    def verdict(self) -> Verdict:
        """The verdict in one word."""
        if self.refused is not None:
            return "refused"
        return "wrong" if self.findings else "unknown" if self.unknown is not None else "proven"


class SetRow(TypedDict):
    """A set of axes."""

    axes: list[str]
    """The axes with several ranks."""
    verdict: Verdict
    """`proven`; `wrong`: there are findings; `unknown`: not read; `refused`: the strategy does not take it."""
    sizes: list[dict[str, int]]
    """The meshes that were traced, axis -> ranks."""
    gradients: int
    """Gradients that were read, on the first rank of each stage."""
    bytes: dict[str, list[int]]
    """Axes, joined by + -> bytes of gradients that a rank sums over them in a step, for each of `sizes`."""
    findings: list[str]
    """What differs from what the axes demand."""
    reason: str | None
    """Why it is refused or unknown."""


class StaticDocument(TypedDict):
    """Output of `trainkit prove --static --world N --json`. Order and count are proven, not values."""

    version: Literal[1]
    """Version of this document."""
    command: str
    """The command."""
    world: int
    """The largest number of ranks."""
    meshes: dict[str, int]
    """Verdict -> number of meshes of powers of two with at most that many ranks."""
    traces: int
    """Steps that were traced, each on one rank."""
    seconds: float
    """Seconds that this took."""
    holds: bool
    """Whether no mesh is wrong or unknown."""
    sets: list[SetRow]
    """The sets of axes; those with fewer axes first."""
    refused_sizes: dict[str, str]
    """Axis and size, `tensor=16` -> why the strategy does not take it."""


def _planned(cfg: RunConfig, *, replicas: int) -> RunPlan:
    """Return the plan of a step of a few small shards on each replica."""
    batch = replace(cfg.batch, global_size=replicas * _SHARDS * _MICRO, micro_size=_MICRO, accumulation=None)
    return make_plan(replace(bare(cfg, 1), batch=batch))


def trace(cfg: RunConfig, axes: Axes) -> Trace:
    """Trace a step of the first rank of each stage.

    Raises:
        ConfigError: the strategy does not take the model or the config.
        Exception: the step cannot be observed.
    """
    plan = _planned(cfg, replicas=axes.replicate * axes.shard)
    model, stories, steps = meta_model(plan.cfg), dict[int, Story](), dict[int, ObservedSteps]()
    for rank in axes.group_of_first("pipe"):

        def watching(*args: Any, rank: int = rank, **named: Any) -> Story:
            stories[rank] = Story(*args, **named)
            return stories[rank]

        steps[rank] = observe(plan, model, rank=rank, watching=watching)
    divisor = LossDivisor.of(plan.components.weighing, plan.batch.global_size)
    return Trace(axes=axes, plan=plan, model=model, stories=stories, steps=steps, divisor=divisor)


def axes_of(ranks: Sequence[int], axes: Axes, stages: Container[int] = ()) -> tuple[str, ...] | None:
    """Return the axes along which a group of ranks extends; None if it is not all ranks along some axes.

    Args:
        ranks: the group.
        axes: all ranks.
        stages: positions along pipe that a group may have alone, those that share a parameter; empty: all.

    Example:
        >>> axes = Axes(replicate=2, shard=2, tensor=2)
        >>> axes_of([0, 4], axes), axes_of([0, 2, 4, 6], axes), axes_of([0, 3], axes)
        (('replicate',), ('replicate', 'shard'), None)
        >>> axes_of([0, 3], Axes(pipe=4), {0, 3}), axes_of([0, 3], Axes(pipe=4))
        (('pipe',), None)
    """
    positions = [axes.coordinates(rank) for rank in ranks]
    along = tuple(axis for axis in AXES if len({position[axis] for position in positions}) > 1)
    sizes = {axis: getattr(axes, axis) for axis in along}
    if "pipe" in along and stages:
        sizes["pipe"] = sum(stage in stages for stage in range(axes.pipe))
    return along if len({*ranks}) == prod(sizes.values()) else None


def findings(traced: Trace, one_device: Trace) -> Iterator[str]:
    """Yield what differs from what the axes demand.

    Each gradient is summed once over replicate, shard and context, scattered over shard; over pipe, if several stages
    have the parameter; over tensor, if it is whole and meets parts of a sequence. The loss begins backward with the
    factor of one device, and where the targets are counted, gradients are divided once by a count that is summed once.
    Each stage exchanges with its neighbours.
    """
    axes, sizes = traced.axes, {axis: getattr(traced.axes, axis) for axis in AXES}
    holders: dict[str, set[int]] = {}
    for rank, story in traced.stories.items():
        for name in story.gradients:
            holders.setdefault(name, set()).add(axes.stage_of(rank))
    for name in one_device.stories[0].gradients.keys() - holders.keys():
        yield f"{name} has no gradient on any stage"
    data_axes = [axis for axis in _DATA if sizes[axis] > 1]
    in_parts = {*_meeting_parts(traced)} if axes.tensor > 1 else set[str]()
    for rank, story in traced.stories.items():
        suffix = f" (stage {axes.stage_of(rank)})" if axes.pipe > 1 else ""
        for name, gradient in story.gradients.items():
            events, counts = gradient.events, gradient.counts
            expected = Counter([*data_axes, *["pipe"] * (len(holders[name]) > 1), *["tensor"] * (name in in_parts)])
            subject = f"the gradient of {name}{suffix}"
            yield from _of_sums(subject, events, expected, axes, holders[name])
            scattered = (axes_of(event.ranks, axes) or () for event in events if event.kind == "scatter")
            if axes.shard > 1 and not any("shard" in along for along in scattered):
                yield f"{subject} is not scattered over shard"
            yield from (f"{subject} is multiplied by {event.factor:g}" for event in events if event.factor is not None)
            if any(event.kind == "mixed" for event in events):
                ended = f"; sums are lost at {', '.join(story.lost)}" if story.lost else ""
                yield f"{subject}: unknown, its parts were summed differently{ended}"
            times = int(traced.divisor.counted)
            if len(counts) != times and (data_axes or counts):  # else the count of this rank is that of all
                yield f"{subject} is divided {len(counts)} times by a count of targets, not {times}"
            for counted in counts if story.seeds else ():  # other stages have no targets of their own
                sums = Counter(axis for event in counted for axis in axes_of(event.ranks, axes) or ("?",))
                wrong = [axis for axis in data_axes if sums[axis] != 1]
                yield from (
                    f"the count of targets is summed {sums[axis]} times over {axis}, not once" for axis in wrong
                )
        yield from _of_bytes(traced, rank)
    if None in traced.seeds:
        yield "the factor with which the loss begins backward is unknown"
    elif traced.seeds != one_device.seeds:
        left, right = (", ".join(f"{seed:g}" for seed in sorted(seeds)) for seeds in (traced.seeds, one_device.seeds))  # type: ignore[type-var]
        yield f"the loss times {left} begins backward, and on one device times {right}, of the mean over all targets"
    yield from _of_stages(traced)


def _of_sums(
    subject: str, events: Iterable[Event], expected: Mapping[str, int], axes: Axes, stages: Container[int]
) -> Iterator[str]:
    """Yield what is wrong with the sums of one gradient."""
    times: Counter[str] = Counter()
    for event in events:
        if event.kind not in ("sum", "scatter"):
            continue
        along = axes_of(event.ranks, axes, stages)
        if along is None:
            yield f"{subject}: unknown, it is summed over ranks {', '.join(map(str, event.ranks))}"
        elif event.op != "sum":
            yield f"{subject} is reduced over {' and '.join(along)} by {event.op}, not by a sum"
        times.update(along or ())
    for axis in AXES:
        if times[axis] != expected.get(axis, 0):
            yield f"{subject} is summed {times[axis]} times over {axis}, not {expected.get(axis, 0)}"


def _meeting_parts(traced: Trace) -> Iterator[str]:
    """Yield the parameters that are whole along tensor, and meet parts of a sequence there."""
    for choice in traced.fit.chosen:
        for name, _ in choice.module.named_parameters():
            if choice.style.name == "sequence" or (choice.style.name == "rowwise_sequence" and name == "bias"):
                yield f"{choice.name}.{name}"


def gradient_bytes(traced: Trace, rank: int) -> dict[tuple[str, ...], int]:
    """Return axes -> bytes of the vectors in which a rank sums gradients over them in a step."""
    totals: Counter[tuple[str, ...]] = Counter()
    for collective in traced.steps[rank].collectives:
        along = axes_of(collective.ranks, traced.axes) or ()
        if collective.is_in_update or "tensor" in along or not along:
            continue
        if collective.kind == ("reduce-scatter" if "shard" in along else "all-reduce"):
            totals[along] += int(collective.num_bytes * collective.times)
    return dict(totals)


def _of_bytes(traced: Trace, rank: int) -> Iterator[str]:
    """Yield the sums whose bytes are not those of the gradients."""
    story, axes = traced.stories[rank], traced.axes
    itemsize = traced.plan.components.precision.master_dtype.itemsize
    cut = traced.fit.dims if axes.tensor > 1 else {}
    expected: Counter[tuple[str, ...]] = Counter()
    params = dict(traced.model.named_parameters())
    for name, gradient in story.gradients.items():
        for event in gradient.events:
            along = axes_of(event.ranks, axes) or ()
            if event.kind == "scatter":
                shape = list(params[name].shape)
                if name in cut:
                    shape[cut[name]] //= axes.tensor
                num_ranks = len(event.ranks)
                expected[along] += ceil(shape[0] / num_ranks) * num_ranks * prod(shape[1:]) * itemsize
            elif event.kind == "sum" and "tensor" not in along:
                expected[along] += gradient.num_elements * itemsize
    slack = itemsize * (1 + sum(buffer.numel() for buffer in traced.model.buffers()))
    for along, size in gradient_bytes(traced, rank).items():
        if along not in expected:
            continue
        passes = (1, _SHARDS) if "shard" in along else (1,)
        if not any(0 <= size - count * expected[along] <= (0 if "shard" in along else slack) for count in passes):
            over = " and ".join(along)
            yield f"rank {rank} sums {size:,} bytes over {over}, and its gradients have {expected[along]:,}"


def _of_stages(traced: Trace) -> Iterator[str]:
    """Yield the stages that do not exchange with their neighbours."""
    ranks = sorted(traced.stories)
    for stage, (rank, following) in enumerate(pairwise(ranks)):
        for kind, sender, receiver in (("activations", rank, following), ("gradients", following, rank)):
            sent, received = traced.stories[sender].sent[receiver], traced.stories[receiver].received[sender]
            if not sent or sent != received:
                between = f"between stages {stage} and {stage + 1}"
                yield f"{kind} {between}: {sent:,} elements are sent, and {received:,} received"


def prove_static(
    config: Callable[[Mapping[str, int]], RunConfig], *, world: int, log: Callable[[str], None] = lambda _: None
) -> tuple[list[SetProof], dict[str, str]]:
    """Prove every set of axes that fits into a number of ranks, each at sizes 2 and 4.

    Args:
        config: mesh -> its checked config; raises ConfigError if it is refused.
        world: the largest number of ranks.
        log: receives a line for each set.

    Returns:
        The proofs, and `axis=size` -> why the strategy does not take it.

    Raises:
        ConfigError: gradients are summed in lanes, whose sums are not read; or no mesh of this config can be planned.
    """
    alone = dict.fromkeys(AXES, 1)
    if config(alone).numerics.reproducible:
        rule = "sums pieces of gradients lane by lane, which --static does not read. Use --layouts, or leave it out."
        raise ConfigError([Problem(key="numerics.reproducible", value=True, rule=rule)])
    refused: dict[str, str] = {}
    powers = [2**exponent for exponent in range(1, max(world, 4).bit_length())]
    for axis, size in product(("pipe", "context", "tensor"), powers):
        try:
            plan = _planned(config({**alone, axis: size}), replicas=1)
            if problems := plan.components.strategy.validate_model(meta_model(plan.cfg), plan.context):
                raise ConfigError(problems)
        except ConfigError as error:
            refused[f"{axis}={size}"] = "; ".join(map(str, error.problems))
    reference: Trace | None = None
    proofs = []
    for count in range(1, len(AXES) + 1):
        for chosen in combinations(AXES, count):
            if 2**count > world:
                continue
            proof = SetProof(axes=chosen)
            log(" x ".join(chosen))
            by_axis = next((refused[f"{axis}=2"] for axis in chosen if f"{axis}=2" in refused), None)
            if by_axis is not None:
                proofs.append(replace(proof, refused=by_axis))
                continue
            both = [{axis: size if f"{axis}={size}" not in refused else 2 for axis in chosen} for size in (2, 4)]
            for sizes in both if both[0] != both[1] else both[:1]:
                mesh = {**alone, **sizes}
                try:
                    cfg = config(mesh)
                    reference = reference or trace(on_one_device(cfg), Axes())
                    traced = trace(cfg, Axes(**mesh))
                except ConfigError as error:
                    proof = replace(proof, refused="; ".join(map(str, error.problems)))
                    break
                except Exception as error:  # noqa: BLE001 - the model, the objective and torch may fail in any way without data
                    proof = replace(proof, unknown=named_first_line(error))
                    break
                proof.sizes.append(sizes)
                proof.findings.extend(f"{mesh_text(mesh)}: {line}" for line in findings(traced, reference))
                for along, size in gradient_bytes(traced, 0).items():
                    proof.num_bytes.setdefault("+".join(along), []).append(size)
                gradients = sum(len(story.gradients) for story in traced.stories.values())
                proof = replace(proof, gradients=proof.gradients + gradients)
            proofs.append(proof)
    return proofs, refused


def verdicts(proofs: Sequence[SetProof], refused: Mapping[str, str], world: int) -> dict[Verdict, int]:
    """Return how many meshes of powers of two with at most `world` ranks have each verdict, by their set of axes.

    What happens to a gradient depends on the axes alone, and is the same at the sizes that were traced.

    Example:
        >>> verdicts([SetProof(axes=("replicate",))], {}, 4)
        {'proven': 3, 'refused': 0, 'wrong': 0, 'unknown': 0}
    """
    counts: dict[Verdict, int] = {"proven": 0, "refused": 0, "wrong": 0, "unknown": 0}
    of_set = {proof.axes: proof.verdict for proof in proofs}
    powers = [2**exponent for exponent in range(world.bit_length())]
    for sizes in product(powers, repeat=len(AXES)):
        if prod(sizes) > world:
            continue
        chosen = {axis: size for axis, size in zip(AXES, sizes, strict=True) if size > 1}
        if any(f"{axis}={size}" in refused for axis, size in chosen.items()):
            counts["refused"] += 1
        elif not chosen or tuple(chosen) in of_set:
            counts[of_set.get(tuple(chosen), "proven")] += 1
    return counts
