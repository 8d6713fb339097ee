"""The answers about one training: predictions, knee, bottleneck and remedies, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np

from trainkit.report.numbers import figure, share
from trainkit.scaling.answers import Remediable, Remedy, binding, knee_of, remedies, servers_needed
from trainkit.scaling.fit import Check, Fit
from trainkit.scaling.inputs import KnownInputs, LinkInputs
from trainkit.scaling.model import Interval, Prediction, predictions
from trainkit.scaling.study_text import VERSION, input_lines, inputs_json, table

_KNEES: Final = 40
"""Draws of the interval of the knee."""
_IMPLAUSIBLE: Final = 1.2
"""Efficiency above which a measurement must have been disturbed."""
_MOST_KNEE: Final = 1024
"""The largest number of replicas up to which a knee is searched."""


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The gain of more replicas for one training."""

    title: str
    known: KnownInputs[LinkInputs]
    shares: tuple[tuple[str, Interval], ...]
    """Measurements of one replica: label, and seconds of a step."""
    grows: bool
    """Whether the samples of a step grow with the replicas."""
    checks: tuple[Check, ...]
    predictions: tuple[Prediction, ...]
    knee: Interval
    """The last number of replicas up to which each further one adds at least half of the speed of the first."""
    bound_at: int
    """The number of replicas at which `binds` and `remedies` hold."""
    binds: str
    binds_share: float
    """Share of a step there."""
    remedies: tuple[Remedy, ...]
    servers: tuple[int, int | None] | None
    """Parameter servers, and the number at which their links do not limit the target; None without servers."""
    cost_per_million: Mapping[int, float]
    """Replicas -> price of a million samples; empty if there is no price."""
    notes: tuple[str, ...]

    @property
    def has_verdict(self) -> bool:
        """Whether the model predicted what this machine measured; otherwise nothing is concluded from it."""
        return all(check.is_inside for check in self.checks)

    @property
    def use_one_device(self) -> bool:
        """Whether not even the second replica pays."""
        return self.knee.middle < 2


@dataclass(frozen=True, kw_only=True)
class ScalingSubject:
    """The scaled training, as far as the fitted model does not contain it."""

    title: str
    known: KnownInputs[LinkInputs]
    shares: Sequence[tuple[str, Interval]]
    """What one replica measured: label, and seconds of a step."""
    keys: Remediable
    """The remaining choices."""
    on_cpu: bool
    """Whether the replicas of a host share its cores, and its price."""
    notes: Sequence[str]


def scaling_of(fit: Fit, counts: Sequence[int], what: ScalingSubject, *, seed: int) -> Scaling:
    """Return the answers of a fitted model."""
    target, known, keys = max(counts), what.known, what.keys
    found = predictions(fit.work, fit.draw, counts, seed=seed)
    rng = np.random.default_rng(seed)
    most = min(target, _MOST_KNEE)
    knees = sorted(knee_of(fit.draw(rng), most) for _ in range(_KNEES))
    middle = knee_of(fit.work, most)
    knee = Interval(low=min(knees[2], middle), middle=middle, high=max(knees[-3], middle))
    # The bottleneck is examined beyond the knee; for a training that scales to the target, at the target.
    bound_at = min(2 * middle, target)
    binds, part = binding(fit.work, bound_at)
    return Scaling(
        title=what.title,
        known=known,
        shares=tuple(what.shares),
        grows=fit.work.grows,
        checks=fit.checks,
        predictions=tuple(found),
        knee=knee,
        bound_at=bound_at,
        binds=binds,
        binds_share=part,
        remedies=tuple(remedies(fit.work, bound_at, keys)) if bound_at > 1 else (),
        servers=(have, servers_needed(fit.work, target, have)) if (have := keys.num_servers) else None,
        cost_per_million=_costs(found, known.values, on_cpu=what.on_cpu),
        notes=(*_doubts(fit.checks, found), *what.notes),
    )


def _doubts(checks: Sequence[Check], found: Sequence[Prediction]) -> Iterator[str]:
    """Yield reasons why the figures should not be trusted."""
    if not all(check.is_inside for check in checks):
        yield "a check lies outside its interval: this machine was busy, or the model lacks something."
    if any(one.efficiency > _IMPLAUSIBLE for one in found):
        yield "a speed-up is larger than the replicas: the measurement of one was disturbed. Repeat it without load."


def _costs(found: Sequence[Prediction], values: LinkInputs, *, on_cpu: bool) -> dict[int, float]:
    if not values.price_h:
        return {}
    costs = {}
    for one in found:
        hosts = math.ceil(one.replicas / values.per_host) if values.per_host else 1
        costs[one.replicas] = (
            values.price_h * (hosts if on_cpu else one.replicas) / 3600 / one.samples_per_s.middle * 1e6
        )
    return costs


def scaling_lines(found: Scaling) -> Iterator[str]:
    """Yield the report."""
    yield found.title
    yield from input_lines(found.known)
    yield ""
    yield "measured: one replica, alone"
    for label, seconds in found.shares:
        yield f"  {label}: {_ms(seconds)} ms a step"
    if found.checks:
        yield ""
        yield "check: each number of replicas predicted from the smaller ones, then measured"
        yield from _check_lines(found.checks)
    yield ""
    yield "predicted, with the interval of nine tenths"
    yield from _prediction_lines(found)
    yield ""
    yield from _answer_lines(found)
    yield from (f"  note: {note}" for note in found.notes)


def _check_lines(checks: Sequence[Check]) -> Iterator[str]:
    rows = [
        (
            str(check.replicas),
            _ms(check.predicted_s),
            figure(check.measured_s * 1000),
            f"{check.error:+.0%}".replace("%", " %"),
            "inside" if check.is_inside else "OUTSIDE",
        )
        for check in checks
    ]
    yield from table(("replicas", "predicted ms a step", "measured", "error", "interval"), rows)


def _prediction_lines(found: Scaling) -> Iterator[str]:
    headings = ["replicas", "ms a step", "samples/s", "speed-up", "efficiency", "most, beside computing"]
    rows = []
    for one in found.predictions:
        parts = {name: value for name, value in one.step.parts().items() if name != "compute"}
        largest = max(parts, key=lambda name: parts[name])
        cost = found.cost_per_million.get(one.replicas)
        rows.append(
            (
                f"{one.replicas:,}",
                figure(one.step.total_s * 1000),
                figure(one.samples_per_s.middle),
                f"{one.speedup.middle:.2f} ({one.speedup.low:.2f} to {one.speedup.high:.2f})",
                share(one.efficiency),
                f"{largest} {share(parts[largest] / one.step.total_s)}" if parts[largest] > 0 else "-",
                *([figure(cost)] if cost is not None else []),
            )
        )
    yield from table([*headings, *(["cost of a million samples"] if found.cost_per_million else [])], rows)


def _answer_lines(found: Scaling) -> Iterator[str]:
    if not found.has_verdict:
        yield "no verdict: the model did not predict what was measured here. Repeat it on an idle machine."
        return
    target = found.predictions[-1].replicas
    knee = found.knee
    around = f" ({knee.low:,.0f} to {knee.high:,.0f})" if knee.high > knee.low else ""
    if found.use_one_device:
        yield f"use one device{around}: a second replica brings less than half of the first"
    elif knee.middle >= target:
        yield f"the knee lies beyond {target:,} replicas{around}: each brings at least half of the first"
    else:
        yield f"the knee: {knee.middle:,.0f} replicas{around}; a further one brings less than half of the first"
    if found.bound_at > 1:
        yield f"bottleneck at {found.bound_at:,} replicas: {found.binds}, {share(found.binds_share)} of a step"
    if found.servers is not None:
        yield _servers_line(found.servers, target)
    if found.remedies:
        yield "remedies, by the model"
        rows = [
            (one.name, f"x {one.gain:.2f}", one.key, "another training" if one.other_training else "")
            for one in found.remedies
        ]
        yield from table(("change", "speed", "by", ""), rows, left=4)


def _servers_line(servers: tuple[int, int | None], target: int) -> str:
    have, need = servers
    if need is None:
        return f"the links of the servers limit {target:,} replicas, for any number of servers"
    if need <= have:
        return f"the links of {have} server{'' if have == 1 else 's'} do not limit {target:,} replicas"
    return (
        f"the links of the servers limit the speed: {target:,} replicas need {need:,} of them (strategy.servers={need})"
    )


def scaling_json(found: Scaling, *, target: int, seed: int) -> dict[str, object]:
    """Return the object that `--json` prints."""
    return {
        "version": VERSION,
        "to_replicas": target,
        "seed": seed,
        "inputs": inputs_json(found.known),
        "measured": [{"what": label, "step_s": asdict(seconds)} for label, seconds in found.shares],
        "checks": [{**asdict(check), "error": check.error, "inside": check.is_inside} for check in found.checks],
        "predictions": [
            {
                "replicas": one.replicas,
                "step_s": one.step.total_s,
                "parts_s": one.step.parts(),
                "samples_per_s": asdict(one.samples_per_s),
                "speedup": asdict(one.speedup),
                "efficiency": one.efficiency,
                "cost_per_million": found.cost_per_million.get(one.replicas),
            }
            for one in found.predictions
        ],
        **_verdict_json(found),
        "notes": list(found.notes),
    }


def _verdict_json(found: Scaling) -> dict[str, object]:
    if not found.has_verdict:
        return {"knee": None, "use_one_device": None, "binds": None, "remedies": [], "servers_needed": None}
    return {
        "knee": asdict(found.knee),
        "use_one_device": found.use_one_device,
        "binds": {"at_replicas": found.bound_at, "what": found.binds, "share": found.binds_share},
        "remedies": [asdict(one) for one in found.remedies],
        "servers_needed": found.servers and found.servers[1],
    }


def _ms(seconds: Interval) -> str:
    middle = figure(seconds.middle * 1000)
    if seconds.low == seconds.high:
        return middle
    return f"{middle} ({figure(seconds.low * 1000)} to {figure(seconds.high * 1000)})"
