"""The config of a run that is resumed or trained again: the run's values, with the changes of the command line."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from trainkit.config.compose import Composer, resolve_exclusive
from trainkit.config.composition import Composition, Level, Origin, TrackedTree, lookup, path_of
from trainkit.config.grammar import key_of, replacing
from trainkit.config.identity import run_config
from trainkit.config.schema import GROUPS, NO_RUN, RunConfig, load_resolved
from trainkit.config.sections import CvConfig, SweepConfig
from trainkit.config.yaml_files import read_document
from trainkit.errors import ConfigError, Problem

_NO_RECIPE: Final = "recipe=null"
"""Run-level values come from the run, so no recipe is composed below the changes."""


def compose_resumed(
    run: Path, overrides: Sequence[str], *, config_dirs: Sequence[Path] = (), packages: Sequence[str] = ()
) -> Composition:
    """Compose a run's config again, with changes, to continue in its folder; a choice replaces the run's node of that
    group.

    Raises:
        ConfigError: there is no such run, or an argument cannot be parsed.
    """
    file = run / "resolved.yaml"
    if not file.is_file():
        raise ConfigError([Problem(key="resume", value=str(run), rule=NO_RUN, origin="command line")])
    changes = Composer(config_dirs, packages).compose(replacing(overrides, _NO_RECIPE))
    # The key that ended the run early does not end the resumed run.
    tree = _merged_tree(changes, replace(run_config(run), stop_at_step=None), file, overrides)
    notes, problems = resolve_exclusive(tree)
    tree.put(("resume",), "auto", Origin(level=Level.command_line, where="command line"))
    return replace(_with_tree(changes, tree, overrides, notes, problems), run_dir=run, run_dir_given=True)


def compose_anew(
    run: Path, overrides: Sequence[str], *, config_dirs: Sequence[Path] = (), packages: Sequence[str] = ()
) -> Composition:
    """Compose the training of a run again, with changes: from the beginning to the end, on all of its samples.

    Keys that the run had left auto are auto again, so that they adapt to the changes. Keys that resume the run, end it
    early or hold a fold out are dropped.

    Raises:
        ConfigError: there is no such run, or an argument cannot be parsed.
    """
    files = [file for file in (run / ".hydra" / "config.yaml", run / "resolved.yaml") if file.is_file()]
    if not files:
        raise ConfigError([Problem(key=str(run), rule=NO_RUN, origin="command line")])
    earlier = load_resolved(files[0]) if files[0].parent != run else run_config(run)
    training = replace(earlier, stop_at_step=None, resume=None, cv=CvConfig(), sweep=SweepConfig())
    changes = Composer(config_dirs, packages).compose(replacing(overrides, _NO_RECIPE))
    tree = _merged_tree(changes, training, files[0], overrides)
    notes, problems = resolve_exclusive(tree)
    if earlier.cv.folds is not None:
        notes = [*notes, f"cv.folds={earlier.cv.folds} of {run} is left out: no fold is held out of this training"]
    return _with_tree(changes, tree, overrides, notes, problems)


def _merged_tree(changes: Composition, earlier: RunConfig, file: Path, overrides: Sequence[str]) -> TrackedTree:
    """Return the run's values, with those of the command line merged over them."""
    document = read_document(file)
    tree = TrackedTree()
    for name, value in earlier.to_dict().items():
        where = f"{file}:{document.lines.get((name,), 1)}"
        # These are resolved values, which the user did not set; keys without effect were reported when the run began.
        tree.put((name,), value, Origin(level=Level.choice, where=where, shipped=True))
    _replace_chosen_groups(tree, changes, overrides)
    for path, origin in changes.origins.items():
        if origin.level is Level.command_line and path[0] != "recipe":
            tree.put(path, copy.deepcopy(lookup(changes.values, path)), origin)
    return tree


def _with_tree(
    changes: Composition, tree: TrackedTree, overrides: Sequence[str], notes: Sequence[str], problems: Sequence[Problem]
) -> Composition:
    return replace(
        changes,
        values=tree.values,
        origins=dict(tree.origins),
        overrides=replacing(overrides, _NO_RECIPE),
        notes=(*notes, *_unused(overrides)),
        problems=(*changes.problems, *problems),
    )


def _unused(overrides: Sequence[str]) -> list[str]:
    ignored = [line for line in overrides if key_of(line) in ("recipe", "experiment") and line != _NO_RECIPE]
    return [f"{line} has no effect: the run keeps what its own {key_of(line)} set" for line in ignored]


def _replace_chosen_groups(tree: TrackedTree, changes: Composition, overrides: Sequence[str]) -> None:
    """Replace the run's node by the values of a choice given on the command line; `+callbacks=gpu` adds one to it, and
    `~callbacks.plots` removes one from it.
    """
    for line in overrides:
        group = key_of(line)
        if line.startswith("~") and "." in group:
            tree.remove(path_of(group))
        elif group in GROUPS and group in changes.values:
            values, origin = changes.values[group], Origin(level=Level.choice, where=changes.origin(group).where)
            if line.startswith("+"):
                added = re.findall(r"[\w-]+", line.partition("=")[2])
                values = {name: node for name, node in values.items() if name in added}
            else:
                tree.remove((group,))
            tree.put((group,), copy.deepcopy(values), origin)
