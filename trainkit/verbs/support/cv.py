"""Cross-validation from the command line: every point of a sweep, or the one there is, becomes a run a fold."""

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

__all__ = ["expand_folds", "refuse_open_folds"]

_LISTING: Final = ("basic", "grid", "random")
"""Sweepers that know all their points beforehand."""


def expand_folds(call: Call) -> Call:
    """The call with `cv.fold` swept over all folds, where it asks for cross-validation and names no fold.

    Raises:
        ConfigError: a sweep that would give its points other folds, or only some of them.
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
    # what is wrong with it is told with everything else that is
    if not isinstance(folds, int) or folds < 2 or cv.get("fold") is not None or "cv.fold" in swept:
        return call
    if composition.sweeper not in _LISTING:
        rule = (
            f"{composition.sweeper} learns from one run after another, and a point has one a fold. Use grid or random."
        )
        raise refusal("hydra/sweeper", rule)
    return replace(call, overrides=replacing(call.overrides, f"cv.fold=range({folds})"))


def refuse_open_folds(points: Iterable[Composition]) -> None:
    """Refuse points that are several runs themselves.

    Raises:
        ConfigError: a recipe among several asks for folds.
    """
    for point in points:
        if point.asks_for_folds:
            rule = "only some points of the sweep ask for it. Give it on the command line, or cv.fold too."
            raise ConfigError([point.problem("cv.folds", rule, value=point.values["cv"]["folds"])])
