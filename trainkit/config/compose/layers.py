"""Merge values, file by file; each key records the line that set it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainkit.config.compose.bounds import reference_problem
from trainkit.config.composition import (
    ConfigFile,
    KeyPath,
    Level,
    Origin,
    TrackedTree,
    dotted,
    is_path_key,
    leaves,
    lookup,
    variable_in,
)
from trainkit.config.schema import GROUPS, LIST_GROUPS
from trainkit.config.secrets import dereferenced, import_marks, reference_paths, remember_secrets, texts_in
from trainkit.config.values import expanded
from trainkit.config.yaml_files import shipped_conf, shipped_recipes
from trainkit.errors import ConfigError, Problem, first_line


class Layers:
    """The values of one composition while they are merged, with notes and problems about them."""

    def __init__(self) -> None:
        self.tree = TrackedTree()
        self.hydra = TrackedTree()
        """Values that the files and arguments set for Hydra itself."""
        self.notes: list[str] = []
        self.problems: list[Problem] = []
        self.variables: dict[KeyPath, Any] = {}
        """Keys whose values come from environment variables, as they were written."""

    def merge(self, files: Sequence[ConfigFile], swapped: Mapping[Level, Mapping[str, str]]) -> None:
        """Merge files in ascending precedence.

        Args:
            files: in ascending precedence.
            swapped: level of the file -> groups whose choice there was replaced from above -> the text of the note.
        """
        for rank, file in enumerate(files):
            self._merge_file(file, rank, swapped.get(file.level, {}))

    def finish(
        self, files: Sequence[ConfigFile], choices: Mapping[str, Any], packages: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Finish the values after the arguments were applied: names, exclusive keys, interpolations, reports on the
        files.
        """
        import_marks(self.tree.values, packages)
        self._complete(choices)
        notes, problems = resolve_exclusive(self.tree)
        self.notes += notes
        self.problems += problems
        values = self._resolved()
        self._report_gotchas(files)
        self._note_shadowed(files)
        return values

    def _merge_file(self, file: ConfigFile, rank: int, swapped: Mapping[str, str]) -> None:
        """Merge one file's values over the values below it."""
        chosen = {group: set(lookup(self.tree.values, (group,)) or ()) for group in LIST_GROUPS}
        whole = Origin(level=file.level, where=shown(file.document.file), file_rank=rank, shipped=file.shipped)
        dropped: dict[str, list[str]] = {}
        for name, value in file.document.values.items():
            path = (*file.package, str(name))
            if path[0] == "hydra":
                self._put(self.hydra, file, whole, path, value)
            elif path[0] in swapped:
                names = value if isinstance(value, Mapping) else {}
                gone = [key for key in names if key not in chosen.get(path[0], ())]
                dropped.setdefault(path[0], []).extend(dotted((*path, str(key))) for key in gone)
                for key in [key for key in names if key not in gone]:
                    self._put(self.tree, file, whole, (*path, str(key)), names[key])
            else:
                self._put(self.tree, file, whole, path, value)
        if not file.document.values and file.package and file.level == Level.choice:
            self._put(self.tree, file, whole, file.package, {})
        for group, keys in ((group, keys) for group, keys in dropped.items() if keys):
            what = f"the keys that the {file.level.name} set in {group} are dropped with it ({', '.join(keys)})"
            self.notes.append(f"{swapped[group]}: {what}")

    def _put(self, tree: TrackedTree, file: ConfigFile, whole: Origin, path: KeyPath, value: Any) -> None:
        """Set a value and everything below it, each key with its own line; `whole` is the origin without a line."""
        line = file.document.lines.get(path[len(file.package) :])
        origin = replace(whole, where=f"{whole.where}:{line}") if line else whole
        if not isinstance(value, Mapping):
            tree.put(path, value, origin)
            return
        if not isinstance(lookup(tree.values, path), Mapping):
            tree.put(path, {}, origin)
        for key, item in value.items():
            self._put(tree, file, whole, (*path, str(key)), item)

    def _complete(self, choices: Mapping[str, Any]) -> None:
        """Add the name, the recipe and a node for every group; expand `~` in paths."""
        for group in GROUPS:
            if group not in self.tree.values and (group in LIST_GROUPS or choices.get(group) is not None):
                self.tree.put((group,), {}, Origin(level=Level.defaults, where=""))
        recipe, experiment = choices.get("recipe"), choices.get("experiment")
        if "recipe" not in self.tree.values:
            self.tree.put(("recipe",), recipe, Origin(level=Level.defaults, where=""))
        if self.tree.values.get("name") is None:
            name = re.sub(r"[^A-Za-z0-9._-]", "_", str(experiment or recipe or "run"))
            self.tree.put(("name",), name, self.tree.origin_of(("name",)))
        for path, value in list(leaves(self.tree.values)):
            if isinstance(value, str) and value.startswith("~") and is_path_key(path[-1]):
                self.tree.put(path, expanded(value), self.tree.origin_of(path))

    def _resolved(self) -> dict[str, Any]:
        """Return the values with `${...}` resolved; secrets that refer to environment variables stay references."""
        values = self.tree.values
        kept = self._references(values)
        remember_secrets(values)
        open_leaves = [(path, value) for path, value in leaves(values) if _has_interpolation(value)]
        open_leaves = [(path, value) for path, value in open_leaves if path not in kept]
        readable = [(path, value) for path, value in open_leaves if not self._unreadable(values, path, value)]
        if not readable:
            return values
        config = OmegaConf.create(values)
        for path, value in readable:
            self._resolve(values, config, path, value)
        return values

    def _resolve(self, values: dict[str, Any], config: Any, path: KeyPath, value: Any) -> None:
        """Resolve one value; report it if it cannot be resolved."""
        try:
            node = OmegaConf.select(config, dotted(path), throw_on_missing=True)
            found = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        except (OmegaConfBaseException, RecursionError) as error:
            where = self.tree.origin_of(path).where
            self.problems.append(Problem(key=dotted(path), value=value, rule=_unresolved(error), origin=where))
            found = None
        self._set(values, path, found)
        if found is not None and any(map(variable_in, value if isinstance(value, list) else [value])):
            self.variables[path] = value

    def _unreadable(self, values: dict[str, Any], path: KeyPath, value: Any) -> bool:
        """Report a value whose references cannot be parsed, and set it to None."""
        rule = reference_problem(value)
        if rule is not None:
            where = self.tree.origin_of(path).where
            self.problems.append(Problem(key=dotted(path), value=value, rule=rule, origin=where))
            self._set(values, path, None)
        return rule is not None

    def _references(self, values: Mapping[str, Any]) -> set[KeyPath]:
        """Return the keys of secrets that refer to environment variables; report variables that are not set."""
        kept = set(reference_paths(values))
        for path in kept:
            try:
                dereferenced(lookup(values, path), key=dotted(path))
            except ConfigError as error:
                where = self.tree.origin_of(path).where
                self.problems += [replace(problem, origin=where) for problem in error.problems]
        return kept

    @staticmethod
    def _set(values: dict[str, Any], path: KeyPath, value: Any) -> None:
        for name in path[:-1]:
            values = values[name]
        values[path[-1]] = value

    def _report_gotchas(self, files: Sequence[ConfigFile]) -> None:
        """Report scalars that YAML 1.1 reinterprets, unless another source set the key again."""
        for file in files:
            name = shown(file.document.file)
            for gotcha in file.document.gotchas:
                path = (*file.package, *gotcha.path)
                where = f"{name}:{gotcha.line}"
                origin = self.tree.origin_of(path)
                if origin.where in (where, "") or origin.where.startswith(f"{name}:"):
                    self.problems.append(Problem(key=dotted(path), value=gotcha.text, rule=gotcha.rule, origin=where))

    def _note_shadowed(self, files: Sequence[ConfigFile]) -> None:
        """Note the shipped files that the user's own folders hide."""
        for file in files:
            if file.shipped:
                continue
            path = Path(file.group) / file.name
            hidden = shipped_conf() / f"{path}.yaml"
            if file.group == "recipe":
                hidden = shipped_recipes() / file.name / "recipe.yaml"
            if hidden.is_file():
                self.notes.append(f"{shown(file.document.file)} shadows the shipped {path.as_posix()}.yaml")

    def folder(self, pattern: Any, values: Mapping[str, Any]) -> Path | None:
        """Return `hydra.run.dir` with its interpolations resolved; None if only a job can resolve them."""
        if not isinstance(pattern, str):
            return None
        rule = reference_problem(pattern)
        try:
            if rule is None:
                named = _named_in(pattern, values)
                return Path(expanded(OmegaConf.create({**named, "_folder_": pattern})["_folder_"]))
        except (OmegaConfBaseException, RecursionError, TypeError) as error:
            rule = _unresolved(error)
        origin = self.hydra.origin_of(("hydra", "run", "dir"))
        if origin.level > Level.defaults:  # silently, the run would be written elsewhere
            self.problems.append(Problem(key="hydra.run.dir", value=pattern, rule=rule, origin=origin.where))
        return None


def _has_interpolation(value: Any) -> bool:
    if isinstance(value, str):
        return "${" in value
    return isinstance(value, list) and any(
        _has_interpolation(item) or (isinstance(item, Mapping) and any(_has_interpolation(v) for _, v in leaves(item)))
        for item in value
    )


def _named_in(pattern: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values that a pattern may refer to: those of the keys named in it, or all if one refers further."""
    named = {key: value for key, value in values.items() if str(key) in pattern}
    return values if any("${" in text for _, text in texts_in(named)) else named


def _unresolved(error: Exception) -> str:
    text = first_line(error)
    if match := re.search(r"Interpolation key '([^']+)' not found", text):
        return f"refers to {match[1]}, and there is no such key."
    return f"cannot be resolved: {text.rstrip('.')}."


def shown(file: Path) -> str:
    """Return the shortest form of a file's path: relative if it is below the current folder."""
    with contextlib.suppress(ValueError):
        return str(file.relative_to(Path.cwd()))
    return str(file)


_PAIRS: Final[tuple[tuple[KeyPath, KeyPath], ...]] = (
    (("epochs",), ("steps",)),
    (("warmup", "epochs"), ("warmup", "steps")),
)
_GLOBAL: Final = ("batch", "global_size")
_MICRO: Final = ("batch", "micro_size")
_ACCUMULATION: Final = ("batch", "accumulation")


def resolve_exclusive(tree: TrackedTree) -> tuple[list[str], list[Problem]]:
    """Displace keys that a key of a higher level contradicts, in the tree itself.

    The sets of exclusive keys are {epochs, steps}; {warmup.epochs, warmup.steps}; and any two of {batch.global_size,
    batch.micro_size, batch.accumulation}. Of these three, `global_size` is displaced last.

    Returns:
        Notes on displaced values that the user had set, and problems of two keys at the same level.
    """
    notes: list[str] = []
    problems: list[Problem] = []
    for pair in _PAIRS:
        _resolve_pair(tree, pair, notes, problems)
    _resolve_batch(tree, notes, problems)
    return notes, problems


def _resolve_pair(tree: TrackedTree, pair: tuple[KeyPath, KeyPath], notes: list[str], problems: list[Problem]) -> None:
    given = [path for path in pair if lookup(tree.values, path) is not None]
    if len(given) < 2:
        return
    low, high = sorted(given, key=lambda path: tree.origin_of(path).rank)
    if tree.origin_of(low).rank < tree.origin_of(high).rank:
        _displace(tree, low, high, notes)
        return
    if lookup(tree.values, low) == 0 == lookup(tree.values, high):
        _displace(tree, low, high, notes)
        return
    rule = f"sets the same as {dotted(pair[0])}, set at the same place. Give one of the two."
    problems.append(_problem(tree, pair[1], rule))


def _resolve_batch(tree: TrackedTree, notes: list[str], problems: list[Problem]) -> None:
    if any(lookup(tree.values, path) is None for path in (_GLOBAL, _MICRO, _ACCUMULATION)):
        return
    whole, micro, accumulation = (tree.origin_of(path).rank for path in (_GLOBAL, _MICRO, _ACCUMULATION))
    if micro < accumulation:
        _displace(tree, _MICRO, _ACCUMULATION, notes)
    elif accumulation < micro:
        _displace(tree, _ACCUMULATION, _MICRO, notes)
    elif whole < micro:
        _displace(tree, _GLOBAL, _MICRO, notes)
    elif whole > micro:
        _displace(tree, _ACCUMULATION, _GLOBAL, notes)
    else:
        rule = "global_size, micro_size and accumulation are set at the same place. Give any two of the three."
        problems.append(_problem(tree, _ACCUMULATION, rule))


def _problem(tree: TrackedTree, path: KeyPath, rule: str) -> Problem:
    return Problem(key=dotted(path), value=lookup(tree.values, path), rule=rule, origin=tree.origin_of(path).where)


def _displace(tree: TrackedTree, loser: KeyPath, winner: KeyPath, notes: list[str]) -> None:
    origin: Origin = tree.origin_of(loser)
    lost = lookup(tree.values, loser)
    won = tree.origin_of(winner)
    if not (origin.shipped and origin.level == 0):
        shown = f"{dotted(winner)}={lookup(tree.values, winner)} ({won.where})"
        notes.append(f"{shown} replaces {dotted(loser)}={lost} ({origin.where})")
    tree.put(loser, None, won)
