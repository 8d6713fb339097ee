"""The quantities that a prediction needs, their defaults, and `--assume NAME=VALUE,...`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from trainkit.config.values import nearest
from trainkit.errors import Problem, refuse
from trainkit.scaling.fit import UNSURE, Fit
from trainkit.scaling.model import Link, Workload, ring

Origin = Literal["assumed", "given", "measured", "hardware"]


@dataclass(frozen=True, kw_only=True)
class InputValue:
    """One input of a prediction."""

    value: float
    """Value of the input, in its unit."""
    unit: str | None
    """The unit; null for a number without one."""
    origin: Origin
    """Origin of the value."""


@dataclass(frozen=True)
class Input:
    """A quantity with its default, which is an assumption and printed as such."""

    default: float
    unit: str
    means: str
    low: float = 0.0
    above: bool = False
    """Whether a value must be above `low`; else it must be at least that."""


_LINK: Final = {
    "gbit": Input(10, "Gbit/s", "the link of a host, in each direction", above=True),
    "latency_us": Input(50, "us", "a message on that link"),
}
HOSTS: Final[Mapping[str, Input]] = {
    "per_host": Input(0, "", "replicas of a host; 0: as many GPUs as this host has, or all replicas on the CPU"),
    **_LINK,
    "price_h": Input(0, "", "price an hour of a GPU, or of a host without any; 0: costs are left out"),
}
"""Inputs that a measurement on one machine cannot determine."""
SIMULATED: Final[Mapping[str, Input]] = {
    "compute_s": Input(0.3, "s", "a replica's forward and backward pass of a step", above=True),
    "spread": Input(0.1, "", "standard deviation of these times by their mean (lognormal)"),
    "samples": Input(32, "", "samples of a replica in a step", low=1),
    "megabytes": Input(100, "MB", "gradients of a step, and variables: 25 million of float32"),
    **_LINK,
    "overlap": Input(0.5, "", "share of the computing time behind which an all-reduce is hidden"),
    "server_gbit": Input(10, "Gbit/s", "the link of a parameter server, in each direction", above=True),
    "mtbf_h": Input(50_000, "h", "mean time between two failures of one replica", above=True),
    "write_s": Input(30, "s", "time for which a checkpoint stops the training"),
    "restart_s": Input(300, "s", "time from a failure to the next step"),
    "price_h": Input(0, "", "price of a replica an hour, in any currency; 0: costs are left out"),
}
"""Inputs of a prediction without any measurement; each replica is a host."""
_UNSURE: Final = ("compute_s", "spread", "megabytes", "gbit", "latency_us", "overlap")


def assumed(inputs: Mapping[str, Input], values: Mapping[Origin, Mapping[str, float]]) -> dict[str, InputValue]:
    """Return every input with the last of its values, by origin; the default without any."""
    defaults: dict[Origin, Mapping[str, float]] = {"assumed": {name: item.default for name, item in inputs.items()}}
    return {
        name: InputValue(value=value, unit=inputs[name].unit or None, origin=origin)
        for origin, numbers in {**defaults, **values}.items()
        for name, value in numbers.items()
    }


def link_of(values: Mapping[str, float]) -> Link:
    """Return the link between two hosts."""
    return Link(bandwidth=values["gbit"] * 1e9 / 8, latency_s=values["latency_us"] / 1e6)


def simulated(inputs: Mapping[str, InputValue]) -> Fit:
    """Return the model of an all-reduce with these inputs; those that are assumed and not given are uncertain."""

    def work(values: Mapping[str, float]) -> Workload:
        return Workload(
            share_s={1: values["compute_s"]},
            samples=values["samples"],
            grows=True,
            exchange=ring(values["megabytes"] * 1e6),
            between=link_of(values),
            per_host=1,
            spread=values["spread"],
            overlap=min(values["overlap"], 1.0),
        )

    values = {name: item.value for name, item in inputs.items()}
    unsure = [name for name in _UNSURE if inputs[name].origin == "assumed"]

    def draw(rng: np.random.Generator) -> Workload:
        return work(values | {name: values[name] * math.exp(rng.normal(0.0, UNSURE)) for name in unsure})

    return Fit(work=work(values), draw=draw)


def parse_assumptions(text: str | None, inputs: Mapping[str, Input]) -> dict[str, float]:
    """Return the values of `--assume`, which name some of the inputs.

    Example:
        >>> parse_assumptions("compute_s=0.12,gbit=100", SIMULATED)
        {'compute_s': 0.12, 'gbit': 100.0}

    Raises:
        ConfigError: every item that is not NAME=NUMBER, with a known name, once, and a number within its limits.
    """
    values: dict[str, float] = {}
    problems: list[Problem] = []
    for item in [] if text is None else text.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if name not in inputs:
            rule = f"is not an input here. {nearest(name, inputs)}"
        elif not equals:
            rule = f"needs a value: {name}=NUMBER."
        elif name in values:
            rule = "is given twice. Give it once."
        else:
            spec = inputs[name]
            comparison, unit = "above" if spec.above else "at least", f" {spec.unit}" if spec.unit else ""
            rule = f"must be a number {comparison} {spec.low:g}{unit}: {spec.means}."
            try:
                number = float(value)
            except ValueError:
                number = math.nan
            if spec.low <= number < math.inf and (number > spec.low or not spec.above):
                values[name] = number
                continue
        problems.append(Problem(key=item.strip() or "--assume", rule=rule, origin="--assume"))
    refuse(problems)
    return values
