"""Composition before Hydra runs. The one place that touches Hydra's internals.

Hydra supplies its grammar of overrides, its search path and its defaults list. The values are then put over one
another here, layer by layer, so that every key remembers the file and line, or the argument, that set it; unknown
keys arrive at the check together instead of ending the program one by one.

    files       Hydra's repository, read with line numbers; its global state, put back
    composer    one search path: parse arguments, compose runs, count out sweeps
    composing   one composition: arguments and the defaults list
    layers      values over values, exclusive keys, interpolations
    space       the arguments of a sweep as axes, and every point of a grid
    loader      Hydra's config loader around composed values; the command of a sweep's job
    jobs        composed runs in Hydra's frame: a job in its folder, a sweep, completion
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainkit.config.compose.composer import Composer, foreign_keys
from trainkit.config.composition import Composition

__all__ = ["Composer", "choices_of", "compose", "foreign_keys"]


def compose(
    overrides: Sequence[str] = (), *, config_dirs: Sequence[str | Path] = (), packages: Sequence[str] = ()
) -> Composition:
    """Compose a run from the shipped configuration, the user's own folders and arguments.

    Hydra's global state is left as it was found.

    Args:
        overrides: arguments as on the command line, `["model=mlp", "optimizer.lr=0.1"]`.
        config_dirs: folders of the user's own YAMLs; they come first on the search path.
        packages: packages that `_target_` may name besides the allowed ones.

    Returns:
        The composition; what was wrong stands in its `problems`.
    """
    return Composer(config_dirs, packages).compose(overrides)


def choices_of(group: str, *, config_dirs: Sequence[str | Path] = ()) -> list[str]:
    """The choices of a group, the user's own included.

    Example:
        >>> "cosine" in choices_of("schedule")
        True
    """
    return Composer(config_dirs).choices_of(group)
