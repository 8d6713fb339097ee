"""The config of a run that goes on: what the run resolved, and what the command line changes about its placement."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trainkit.config.compose import Composer
from trainkit.config.composition import Composition
from trainkit.config.documents import read_document
from trainkit.config.exclusive import settle
from trainkit.config.origins import Layered, Level, Origin, lookup
from trainkit.config.schema import GROUPS, load_resolved
from trainkit.errors import ConfigError, Problem

__all__ = ["compose_resumed"]


def compose_resumed(
    run: Path, overrides: Sequence[str], *, config_dirs: Sequence[Path] = (), packages: Sequence[str] = ()
) -> Composition:
    """Compose a run's config again, with changes.

    Args:
        run: the run folder.
        overrides: arguments; a choice replaces the run's own node of that group.
        config_dirs: folders of the user's own YAMLs, for choices.
        packages: packages that targets may come from besides.

    Returns:
        The composition; it continues in the run's folder.

    Raises:
        ConfigError: there is no such run, or an argument cannot be read.
    """
    file = run / "resolved.yaml"
    if not file.is_file():
        rule = "is no run folder: it has no resolved.yaml."
        raise ConfigError([Problem(key="resume", value=str(run), rule=rule, origin="command line")])
    earlier = load_resolved(file)
    document = read_document(file)
    changes = Composer(config_dirs, packages).compose(["recipe=null", *overrides])
    tree = Layered()
    # What ended the run early is what is gone on from.
    for name, value in replace(earlier, stop_at_step=None).to_dict().items():
        where = f"{file}:{document.lines.get((name,), 1)}"
        # Resolved values are nobody's wish: what has no effect among them was told when the run began.
        tree.put((name,), value, Origin(level=Level.choice, where=where, shipped=True))
    _replace_chosen_groups(tree, changes, overrides)
    for path, origin in changes.origins.items():
        if origin.level is Level.command_line and path[0] != "recipe":
            tree.put(path, copy.deepcopy(lookup(changes.values, path)), origin)
    notes, problems = settle(tree)
    tree.put(("resume",), "auto", Origin(level=Level.command_line, where="command line"))
    return replace(
        changes,
        values=tree.values,
        origins=dict(tree.origins),
        overrides=("recipe=null", *overrides),
        notes=tuple(notes),
        problems=(*changes.problems, *problems),
        run_dir=run,
        run_dir_given=True,
    )


def _replace_chosen_groups(tree: Layered, changes: Composition, overrides: Sequence[str]) -> None:
    """A choice on the command line replaces the run's node as a whole, with the new choice's values below it."""
    chosen = {line.partition("=")[0] for line in overrides}
    for group in GROUPS:
        if group in chosen and group in changes.values:
            tree.remove((group,))
            origin = Origin(level=Level.choice, where=changes.origin(group).where)
            tree.put((group,), copy.deepcopy(changes.values[group]), origin)
