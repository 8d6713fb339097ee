"""Cross-validation from the command line: every point becomes one run per fold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from trainkit.config.compose import Composer
from trainkit.config.composition import Composition
from trainkit.config.grammar import refusal, replacing
from trainkit.errors import ConfigError

if TYPE_CHECKING:
    from trainkit.verbs.support.call import Call

_LISTING: Final = ("basic", "grid", "random")
"""Sweepers that know all their points in advance."""


def expand_folds(call: Call) -> Call:
    """Return the call with `cv.fold` swept over all folds, where it asks for cross-validation without naming a fold.

    Raises:
        ConfigError: a sweep would give its points different folds, or only some of them.
    """
    composer = Composer(call.config_dirs, call.packages)
    parsed, _ = composer.parse(call.overrides)
    swept = {item.key_or_group for item in parsed if item.is_sweep_override()}
    if "cv.folds" in swept:
        raise refusal("cv.folds", "is one number: a sweep compares points on the same folds.")
    single = [item.input_line or "" for item in parsed if not item.is_sweep_override()]
    composition = composer.compose(single, for_others=True)
    cv = composition.values.get("cv") or {}
    folds = cv.get("folds")
    # The check reports what is wrong with it, together with all other problems.
    if not isinstance(folds, int) or folds < 2 or cv.get("fold") is not None or "cv.fold" in swept:
        return call
    if composition.sweeper not in _LISTING:
        rule = (
            f"{composition.sweeper} learns from one run after another, and a point has one a fold. Use grid or random."
        )
        raise refusal("hydra/sweeper", rule)
    return replace(call, overrides=replacing(call.overrides, f"cv.fold=range({folds})"))


def refuse_open_folds(points: Iterable[Composition]) -> None:
    """Refuse points of a sweep that are cross-validations themselves, of several runs each.

    Raises:
        ConfigError: a recipe among several sets cv.folds.
    """
    for point in points:
        if point.asks_for_folds:
            rule = "only some points of the sweep ask for it. Give it on the command line, or cv.fold too."
            raise ConfigError([point.problem("cv.folds", rule, value=point.values["cv"]["folds"])])
