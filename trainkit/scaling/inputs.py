"""The quantities that a prediction or simulation needs, their defaults, and `--assume NAME=VALUE,...`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Final, Generic, Literal, TypeVar

from trainkit.config.values import nearest
from trainkit.errors import ConfigError, Problem

Origin = Literal["assumed", "given", "measured", "hardware"]


def _input(default: float, unit: str, means: str, *, low: float = 0.0, above: bool = False) -> float:
    """Return a field with its unit and its limit: at least `low`, or above it."""
    limits = {"unit": unit, "means": means, "low": low, "above": above}
    made: float = field(default=default, metadata=limits)
    return made


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """One value for each quantity; the defaults are assumptions, and printed as such."""

    compute_s: float = _input(0.3, "s", "a replica's forward and backward pass of a step", above=True)
    spread: float = _input(0.1, "", "standard deviation of these times by their mean (lognormal)")
    samples: float = _input(32, "", "samples of a replica in a step", low=1)
    megabytes: float = _input(100, "MB", "gradients of a step, and variables: 25 million of float32")
    gbit: float = _input(10, "Gbit/s", "the link of a replica, in each direction", above=True)
    latency_us: float = _input(50, "us", "a message on that link")
    overlap: float = _input(0.5, "", "share of the computing time behind which an all-reduce is hidden")
    server_gbit: float = _input(10, "Gbit/s", "the link of a parameter server, in each direction", above=True)
    mtbf_h: float = _input(50_000, "h", "mean time between two failures of one replica", above=True)
    write_s: float = _input(30, "s", "time for which a checkpoint stops the training")
    restart_s: float = _input(300, "s", "time from a failure to the next step")
    price_h: float = _input(0, "", "price of a replica an hour, in any currency; 0: costs are left out")

    @property
    def num_bytes(self) -> float:
        """Bytes of the gradients."""
        return self.megabytes * 1e6

    @property
    def bandwidth(self) -> float:
        """Bytes per second of a replica's link."""
        return self.gbit * 1e9 / 8

    @property
    def server_bandwidth(self) -> float:
        """Bytes per second of a server's link."""
        return self.server_gbit * 1e9 / 8

    @property
    def latency_s(self) -> float:
        """Seconds of a message."""
        return self.latency_us / 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkInputs:
    """Inputs that a measurement on one machine cannot determine."""

    per_host: float = _input(0, "", "replicas of a host; 0: as many GPUs as this host has, or all replicas on the CPU")
    gbit: float = _input(10, "Gbit/s", "the link between two hosts, in each direction", above=True)
    latency_us: float = _input(50, "us", "a message on that link")
    price_h: float = _input(0, "", "price an hour of a GPU, or of a host without any; 0: costs are left out")

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the link between two hosts."""
        return self.gbit * 1e9 / 8

    @property
    def latency_s(self) -> float:
        """Seconds of a message."""
        return self.latency_us / 1e6


Values = TypeVar("Values", Inputs, LinkInputs)


@dataclass(frozen=True, kw_only=True)
class KnownInputs(Generic[Values]):
    """Inputs, and the origin of each value."""

    values: Values
    origins: Mapping[str, Origin] = field(default_factory=dict)
    """Name -> origin, of every value that is not an assumption."""

    def with_values(self, origin: Origin, found: Mapping[str, float]) -> KnownInputs[Values]:
        """Return the inputs with other values from one origin."""
        origins = {**self.origins, **dict.fromkeys(found, origin)}
        return replace(self, values=replace(self.values, **found), origins=origins)

    def rows(self) -> list[tuple[str, float, str, Origin, str]]:
        """Return name, value, unit, origin and meaning of each."""
        return [
            (
                one.name,
                getattr(self.values, one.name),
                one.metadata["unit"],
                self.origins.get(one.name, "assumed"),
                one.metadata["means"],
            )
            for one in fields(self.values)
        ]


_LARGEST: Final = 1e15


def parse_assumptions(text: str, kind: type[Inputs | LinkInputs]) -> dict[str, float]:
    """Return the values of `--assume`, which name fields of `kind`.

    Example:
        >>> parse_assumptions("compute_s=0.12,gbit=100", Inputs)
        {'compute_s': 0.12, 'gbit': 100.0}

    Raises:
        ConfigError: every item that is not NAME=NUMBER, with a known name, once, and a number within its limits.
    """
    known = {one.name: one for one in fields(kind)}
    found: dict[str, float] = {}
    problems: list[Problem] = []
    for item in text.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        rule = _item_rule(name, equals, value, known, found)
        if rule is None:
            found[name] = float(value)
        else:
            problems.append(Problem(key=item.strip() or "--assume", rule=rule, origin="--assume"))
    if problems:
        raise ConfigError(problems)
    return found


def _item_rule(
    name: str, equals: str, value: str, known: Mapping[str, Field[float]], found: Mapping[str, float]
) -> str | None:
    """Return the problem of one item, or None."""
    if name not in known:
        return f"is not an input here. {nearest(name, known)}"
    if not equals:
        return f"needs a value: {name}=NUMBER."
    if name in found:
        return "is given twice. Give it once."
    limits = known[name].metadata
    comparison = "above" if limits["above"] else "at least"
    unit = f" {limits['unit']}" if limits["unit"] else ""
    rule = f"must be a number {comparison} {limits['low']:g}{unit}: {limits['means']}."
    try:
        number = float(value)
    except ValueError:
        return rule
    is_low = number <= limits["low"] if limits["above"] else number < limits["low"]
    return rule if is_low or not math.isfinite(number) or number > _LARGEST else None
