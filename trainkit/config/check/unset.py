"""Check a config for a verb that does not need all of its values."""

from __future__ import annotations

from dataclasses import replace

from trainkit.config.check import check_both, checked, notes_about_keys
from trainkit.config.composition import Composition
from trainkit.errors import ConfigError


def checked_without(composition: Composition, group: str) -> Composition:
    """Check as `checked` does, but for required keys of a group that are not set: each is a note.

    Raises:
        ConfigError: there are other problems.
    """
    node = composition.values.get(group) or {}
    unset = [key for key, value in node.items() if value == "???"]
    if not unset:
        return checked(composition)
    rest = replace(composition, values={**composition.values, group: {k: v for k, v in node.items() if v != "???"}})
    lacking = {f"{group}.{key}" for key in unset}
    problems = [problem for problem in check_both(rest) if problem.key not in lacking]
    if problems:
        raise ConfigError(problems)
    return composition.with_notes(
        [*notes_about_keys(rest), *(f"{group}.{key} is not set: a training needs it" for key in unset)]
    )
