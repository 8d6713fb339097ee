"""A run-level key that is ignored without a word is caught here alone: each is changed."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from trainkit.config.check import check_names, check_values
from trainkit.config.compose import compose
from trainkit.config.identity import difference, fingerprint, tag_of
from trainkit.config.schema import GROUPS, RunConfig, hints_of
from trainkit.config.values import misfit, plain

WORDS = "sqrt base skip max val/accuracy auto default other stop none contiguous"
CANDIDATES = (False, True, 3, 16, 0.5, *WORDS.split(), ["new_schedule"])


def run_level_keys(kind: Any = RunConfig, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for field in fields(kind):
        hint = plain(hints_of(kind)[field.name])
        if is_dataclass(hint):
            yield from run_level_keys(hint, (*path, field.name))
        elif field.name not in (*GROUPS, "recipe", "optimizers") or path:
            yield (*path, field.name)


KEYS = list(run_level_keys())


def another_value(path: tuple[str, ...]) -> object:
    kind: typing.Any = RunConfig
    for name in path[:-1]:
        kind = plain(hints_of(kind)[name])
    hint = plain(hints_of(kind)[path[-1]])
    default = getattr(kind(), path[-1])
    return next(value for value in CANDIDATES if misfit(value, hint) is None and value != default)


@pytest.mark.parametrize("path", KEYS, ids=".".join)
def test_a_changed_key_is_reported_as_a_problem_or_a_difference(path: tuple[str, ...]) -> None:
    value = another_value(path)
    text = str(value).lower() if isinstance(value, bool) else value
    composed = compose(["recipe=null", f"{'.'.join(path)}={text}"])
    reports = check_names(composed) or check_values(composed)
    if reports:
        assert all(problem.key.startswith(path[0]) for problem in reports)
        return
    before, after = compose(["recipe=null"]).cfg, composed.cfg
    (changed,) = [item for item in difference(before, after) if item.key == ".".join(path)]
    assert changed.tag is tag_of(after, path).tag or not changed.matters
    assert (fingerprint(before) != fingerprint(after)) == changed.matters
