"""List the shipped strategies with their classes, which declare the facts for texts and advice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from trainkit.config.targets.allowed import TARGET
from trainkit.config.targets.build import resolve_target
from trainkit.config.values import either
from trainkit.config.yaml_files import read_document, shipped_conf
from trainkit.strategies.base import Strategy


class Shipped(NamedTuple):
    """One shipped strategy."""

    name: str
    """Choice of the group `strategy`."""
    target: str
    """The `_target_` of its YAML."""
    kind: type[Strategy]


def shipped_strategies() -> Iterator[Shipped]:
    """Yield the shipped strategies, the simplest first."""
    files = sorted((shipped_conf() / "strategy").glob("*.yaml"))
    targets = [(file.stem, str(read_document(file).values[TARGET])) for file in files]
    shipped = [Shipped(name, target, resolve_target(target)) for name, target in targets]
    yield from sorted(shipped, key=lambda strategy: strategy.kind.facts.position)


def names_of(has: Callable[[type[Strategy]], bool]) -> str:
    """Return the choices of `strategy` that have a property, as a text.

    Example:
        >>> names_of(lambda kind: kind.facts.converts)
        'one_device, mirrored, multi_worker_mirrored or fsdp'
    """
    return either(strategy.name for strategy in shipped_strategies() if has(strategy.kind))
