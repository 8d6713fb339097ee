"""Values out of range for any key: integers beyond 64 bits and paths that are too long."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainkit.config.composition import Composition
from trainkit.config.provenance import is_path_key, leaves
from trainkit.config.texts import path_rule
from trainkit.errors import Problem

__all__ = ["beyond_64_bits", "paths_too_long"]


def beyond_64_bits(composition: Composition) -> Iterator[Problem]:
    """Yield a problem for each integer that does not fit into 64 bits, as tensors and counters need."""
    for path, value in leaves(composition.values):
        large = [one for one in _numbers_in(value) if not -(2**63) <= one < 2**63]
        if large:
            yield composition.problem(path, "must fit into 64 bits: less than 2**63.", value=value)


def paths_too_long(composition: Composition) -> Iterator[Problem]:
    """Yield a problem for each path that no file system accepts, including the folder of the run."""
    for path, value in leaves(composition.values):
        rule = path_rule(value) if isinstance(value, str) and is_path_key(path[-1]) else None
        if rule is not None:
            yield composition.problem(path, rule, value=value)
    rule = None if composition.run_dir is None else path_rule(str(composition.run_dir))
    if rule is not None and composition.run_dir_given:
        yield Problem(key="hydra.run.dir", value=str(composition.run_dir), rule=rule)


def _numbers_in(value: Any) -> Iterator[int]:
    if isinstance(value, list):
        for item in value:
            yield from _numbers_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _numbers_in(item)
    elif isinstance(value, int):
        yield value
