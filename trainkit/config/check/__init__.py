"""Find every problem of a config before a process, port, file or folder exists.

The first phase looks at names, choices, keys and run-level values and imports no target, so that it is fast. The second
phase imports the targets (only those of allowed packages) and checks their signatures against the config.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, Final

from trainkit.config.check.recipe_keys import fitted, is_of_recipe_alone
from trainkit.config.check.rules import (
    broken_rules,
    section_of,
    sections_of,
    unused_keys,
    unused_keys_in_launch,
    with_defaults,
)
from trainkit.config.composition import Composition, ConfigFile, KeyPath, dotted, is_path_key, lookup, path_of
from trainkit.config.grammar import COMMAND_LINE, key_of
from trainkit.config.interface import own_folder
from trainkit.config.optimizers import optimizer_node
from trainkit.config.schema import GROUPS, LIST_GROUPS, RunConfig, hints_of, misfits
from trainkit.config.secrets import literal_secret, literal_secrets
from trainkit.config.targets.allowed import ALLOWED_PACKAGES, TARGET, allow_packages, name_problem, targets_in
from trainkit.config.targets.build import GROUP_KEYS, INJECTED, build, resolve_target
from trainkit.config.targets.checks import NodeCheck, unchecked_keys
from trainkit.config.targets.kinds import PLACES
from trainkit.config.values import closest, expanded, leaves, path_rule, plain
from trainkit.config.yaml_files import hint_for_word
from trainkit.errors import Problem, refuse
from trainkit.files import file_in_the_way
from trainkit.redaction import redacted_argument

_UNNAMED: Final = ("cluster", "average", "convert", "hardware")
"""Groups whose choice may name no class."""
_OPTIONAL: Final = (*_UNNAMED, *LIST_GROUPS)
_IN_LAUNCH: Final = ("loader", "precision", "supervisor", "numerics", "elastic")
"""Sections with keys that may have no effect on this machine."""
NEEDS_VALUE: Final = "needs a value:"
"""Prefix of the rule about a key without a value."""


def checked(composition: Composition) -> Composition:
    """Run both phases of the check; return the composition with notes, and without keys that the user's keys make
    impossible.

    The notes name keys of a recipe or of the user's files that have no effect in this composition, and keys that no
    signature describes. The keys left out are those of a recipe, and of a choice whose class the user replaced.

    Raises:
        ConfigError: the problems of the first phase with problems, as `check_names_first` and `check_values` find them.
    """
    return checked_values(checked_names(composition))


def checked_names(composition: Composition) -> Composition:
    """Run the first phase of `checked`, which imports no target; after problems the second, on keys of the user only.

    Raises:
        ConfigError: all of them.
    """
    composition, problems = fitted(composition, check_names_first)
    refuse(problems)
    return composition


def checked_values(composition: Composition) -> Composition:
    """Run the second phase of `checked` on a composition whose names are sound.

    Raises:
        ConfigError: its problems.
    """
    if check_values(composition):  # what is left out may break rules of the first phase
        composition, problems = fitted(composition, lambda trimmed: check_names_first(trimmed) or check_values(trimmed))
        refuse(problems)
    return composition.with_notes(notes_about_keys(composition))


def checked_without(composition: Composition, group: str) -> Composition:
    """Check as `checked` does, for a verb that does not need all values: a required key of a group that is not set is a
    note.

    Raises:
        ConfigError: there are other problems.
    """
    node = composition.values.get(group) or {}
    unset = [key for key, value in node.items() if value == "???"]
    if not unset:
        return checked(composition)
    values = {key: value for key, value in node.items() if key not in unset}
    partial = replace(composition, values={**composition.values, group: values})
    problems = check_names_first(partial) or check_values(partial)
    refuse([problem for problem in problems if problem.key not in {f"{group}.{key}" for key in unset}])
    notes = (f"{group}.{key} is not set: a training needs it" for key in unset)
    return composition.with_notes([*notes_about_keys(partial), *notes])


def notes_about_keys(composition: Composition) -> tuple[str, ...]:
    """Return notes about keys that have no effect, and about keys that are not checked."""
    with allow_packages(composition.packages):
        unchecked = [key for path, node in _nodes(composition) for key in unchecked_keys(path, node)]
    notes = [f"{key}: not checked, its class takes any key" for key in unchecked]
    return (*unused_keys(composition, multirun=False)[1], *notes)


def check_names_first(composition: Composition, *, multirun: bool = False) -> list[Problem]:
    """Return the problems of the first phase; if there are any, also those of the second, of the keys the user set."""
    problems = check_names(composition, multirun=multirun)
    return [*problems, *check_values(composition, problems)] if problems else []


def check_names(composition: Composition, *, multirun: bool = False) -> list[Problem]:
    """Run the first phase, which imports no target; keys about sweeps have an effect in a `multirun` only."""
    problems = list(composition.problems)
    problems += _run_problems(composition)
    check = NodeCheck(composition)
    for group in GROUPS:
        problems += _group_problems(check, group)
    limited = {problem.key for problem in problems}  # a key with a limit of its own is reported already
    problems += (problem for problem in _leaf_problems(composition) if problem.key not in limited)
    problems += _unusable_folders(composition)
    problems += _hydra_problems(composition)
    values = {**composition.values, "hydra": composition.hydra}
    problems += [replace(problem, origin=composition.origin(problem.key).where) for problem in literal_secrets(values)]
    hidden = [line for line in composition.hydra_overrides if redacted_argument(line) != line]
    problems += [replace(literal_secret(key_of(line)), origin=COMMAND_LINE) for line in hidden]
    problems += broken_rules(composition, problems, multirun=multirun)
    # A problem found while composing a key is the cause of a problem with its value.
    reported = {(problem.key, problem.origin) for problem in composition.problems}
    others = [problem for problem in problems if (problem.key, problem.origin) not in reported]
    return _deduplicated([*composition.problems, *others])


def check_values(composition: Composition, reported: Sequence[Problem] = ()) -> list[Problem]:
    """Run the second phase: import the targets and check their keys and values.

    Args:
        composition: the run.
        reported: the problems of the first phase. If there are any, only nodes with other keys of the user are checked:
            to import the targets takes a second.

    Returns:
        The problems of other keys than those reported.
    """
    problems = list(reported)
    check = NodeCheck(composition)

    def is_suspect(*path: str) -> bool:
        return not reported or any(not _is_named(key, reported) for key in composition.given_below(path))

    def is_sound(*sections: str) -> bool:
        return not sections_of(problems) & {*sections}

    with allow_packages(composition.packages):
        for path, node in _nodes(composition):
            if is_suspect(*path):
                problems += check.problems(path, node)
        for name, hint in hints_of(RunConfig).items():
            # a run that is resumed has the weights that it began with in its checkpoints
            if name != "init_from" or composition.values["resume"] is None:
                problems += check.absent_files((name,), composition.values.get(name), hint)
        if not reported and is_sound("callbacks", "model", "data"):
            problems += _unsuited_callbacks(composition)
        if composition.values["optimizers"] and is_suspect("optimizers"):
            problems += _named_optimizers(check)
        if is_suspect("eval", "metric") and is_sound("eval", "objective"):
            problems += _unknown_metric(composition)
        suspect = "precision" in composition.given_keys or any(map(is_suspect, _IN_LAUNCH))
        if suspect and is_sound("data", "strategy", "cluster", "precision"):
            unused = unused_keys_in_launch(with_defaults(composition, problems))
            problems += [problem for problem in unused if is_sound(section_of(problem))]
        others = (problem for problem in problems[len(reported) :] if not _is_named(path_of(problem.key), reported))
        return _deduplicated(composition.without_secrets(others))


def _named_optimizers(check: NodeCheck) -> Iterator[Problem]:
    """Yield the keys that the classes of `optimizers` do not take."""
    values = check.composition.values
    base, entries = values["optimizer"], values["optimizers"]
    readable = isinstance(base, Mapping) and isinstance(entries, Mapping)  # the first phase reports it otherwise
    for name, entry in entries.items() if readable else ():
        path = ("optimizers", str(name))
        if not isinstance(entry, Mapping):
            continue
        node = optimizer_node(base, entry)
        prefixes = (dotted(path),) if TARGET in entry else tuple(dotted((*path, key)) for key in entry)
        problems = check.problems(path, node, PLACES["optimizer"]) if TARGET in node else ()
        yield from (problem for problem in problems if problem.key.startswith(prefixes))
        schedule = entry.get("schedule")
        if isinstance(schedule, Mapping) and TARGET in schedule:
            yield from check.problems((*path, "schedule"), schedule, PLACES["schedule"])


def _is_named(path: KeyPath, problems: Iterable[Problem]) -> bool:
    """Return whether a problem names a key, or a key above or below it."""
    paths = (path_of(problem.key) for problem in problems)
    return any(path[: len(other)] == other[: len(path)] for other in paths)


def _unsuited_callbacks(composition: Composition) -> Iterator[Problem]:
    """Report callbacks that a recipe chose for its own model and data, where others were chosen that lack something.

    A class may set an attribute when it is built, so a callback that the user chose is tried at the start of the run.
    """
    values = composition.values
    for name, node in values["callbacks"].items():
        path = ("callbacks", name)
        needs = getattr(resolve_target(node[TARGET]), "needs", {}) if is_of_recipe_alone(composition, path) else {}
        for group, names in needs.items():
            target = resolve_target(values[group][TARGET])
            lacking = [attr for attr in names if isinstance(target, type) and not hasattr(target, attr)]
            if lacking:
                rule = f"needs {' and '.join(names)} of the {group}, and {target.__name__} has no {', '.join(lacking)}."
                yield composition.problem(path, rule, show_value=False)


def _unknown_metric(composition: Composition) -> Iterator[Problem]:
    """Report `eval.metric` where the objective computes no metric of this name."""
    metric = composition.values["eval"]["metric"]
    objective = build(composition.values["objective"], "objective")
    metrics = getattr(objective, "metrics", None)
    if metric is None or not callable(metrics):
        return
    names = [name for name, entry in metrics().items() if not getattr(entry, "gives_table", False)]
    split = metric.partition("/")[0]
    split = split if split.startswith("val_") else "val"  # which splits the data has is known when it is built
    choices = [f"{split}/loss", *(f"{split}/{name}" for name in (*getattr(objective, "term_names", ()), *names))]
    of_several = metric.rpartition("/")[0]  # val/f1/cat, where the metric f1 gives a number a class
    if metric not in choices and of_several not in choices[1:]:
        near = closest(metric, choices)
        hint = f"Did you mean {near}? " if near else ""
        rule = f"no such metric. {hint}There are: {', '.join(choices)}."
        yield composition.problem("eval.metric", rule, value=metric)


def _run_problems(composition: Composition) -> Iterator[Problem]:
    """Yield unknown keys, and values that do not fit the schema; groups have checks of their own."""
    for path, value, rule in misfits(composition.values):
        if rule is None:
            yield composition.problem(path, _unknown_rule(path, composition), show_value=False)
        elif path[0] not in GROUPS:
            yield composition.problem(path, rule, value=value)


def _unknown_rule(key: KeyPath, composition: Composition) -> str:
    *path, name = key
    hints = hints_of(RunConfig if not path else plain(hints_of(RunConfig)[path[0]]))
    if not path and (hint := hint_for_word(name)):
        return f"no such key. {hint}"
    near = closest(name, hints)
    if near is None and not path:
        sections = {key: hint for key, hint in hints.items() if is_dataclass(plain(hint))}
        matches = [f"{section}.{name}" for section, hint in sections.items() if name in hints_of(plain(hint))]
        single = [group for group in GROUPS if group not in LIST_GROUPS]
        matches += [f"{group}.{name}" for group in single if name in (composition.values.get(group) or {})]
        near = matches[0] if len(matches) == 1 else None
        if name == "experiment":
            return f"there is no such folder of choices. Write DIR/experiment/NAME.yaml, and give {own_folder()}."
        return f"no such key. Did you mean {near}?" if near else "no such key. `trainkit ls` shows the groups."
    if near is None:
        return f"no such key in {path[0]}. There are: {', '.join(hints)}."
    return f"no such key. Did you mean {dotted((*path, near))}?"


def _group_problems(check: NodeCheck, group: str) -> Iterator[Problem]:
    """Check the nodes of one group: they exist, come from an allowed package, and have known keys."""
    composition = check.composition
    value = composition.values.get(group)
    if value is None or (not value and group not in _OPTIONAL):
        if not any(problem.key == group for problem in composition.problems):
            choices = ", ".join(check.choices(group))
            rule = f"needs a choice. There are: {choices}."
            origin = COMMAND_LINE if group in composition.given_keys else composition.origin(group).where
            yield Problem(key=group, value=None, rule=rule, origin=origin)
        return
    if not isinstance(value, Mapping):
        yield composition.problem(group, "must be a choice, or a mapping with _target_.", value=value)
        return
    nodes = [((group, name), node) for name, node in value.items()] if group in LIST_GROUPS else [((group,), value)]
    for path, node in nodes:
        if not isinstance(node, Mapping) or (TARGET not in node and group not in _UNNAMED):
            yield from _without_target(check, path, node)
            continue
        for inner, target in targets_in(node, path):  # by their text: classes of other packages, for example
            if (refused := name_problem(target, (*ALLOWED_PACKAGES, *composition.packages))) is not None:
                yield composition.problem(inner, refused, value=target)
        yield from _keys_of_shipped(check, path, node)


def _without_target(check: NodeCheck, path: KeyPath, node: Any) -> Iterator[Problem]:
    group, composition = path[0], check.composition
    if group in LIST_GROUPS:
        choices = check.choices(group)
        if path[1] in choices:
            rule = f"is not among the chosen {group}: add it, {group}=[...,{path[1]}]."
        else:
            near = closest(path[1], choices)
            rule = f"no such choice in {group}." + (f" Did you mean {near}?" if near else f" It needs a {TARGET}.")
        yield composition.problem(path, rule, show_value=False)
    elif not isinstance(node, Mapping):
        yield composition.problem(path, "must be a choice, or a mapping with _target_.", value=node)
    else:
        yield composition.problem((*path, TARGET), "is missing: the class or function to build.", show_value=False)


def _keys_of_shipped(check: NodeCheck, path: KeyPath, node: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield unknown keys of a shipped choice, which has every key that its class takes."""
    composition = check.composition
    file = next((choice for choice in composition.files if choice.package == path and choice.group == path[0]), None)
    if file is None or not file.shipped or lookup(file.document.values, (TARGET,)) != node.get(TARGET):
        return
    keys = tuple(dict.fromkeys((*file.document.values, *GROUP_KEYS.get(path[0], ()))))
    for name in node:
        if name in INJECTED.get(path[0], ()):
            yield composition.problem(
                (*path, name), "is set by trainkit: it is not a key of the config.", show_value=False
            )
        elif name not in keys:
            yield check.unknown(path, name, file.name, keys)


def _hydra_problems(composition: Composition) -> list[Problem]:
    """Ask Hydra to check the arguments meant for it, where there are any."""
    files = [file for file in composition.files if not file.shipped and _configures_hydra(file)]
    arguments = [
        line for line in composition.hydra_overrides if not line.startswith(("hydra.run.dir=", "hydra.sweep.dir="))
    ]
    if not files and not arguments:
        return []
    from trainkit.config.compose.jobs import hydra_problems  # noqa: PLC0415 - costs 50 ms

    return hydra_problems(composition)


def _configures_hydra(file: ConfigFile) -> bool:
    return "hydra" in file.document.values or any("hydra/" in str(item) for item in file.document.defaults)


def _nodes(composition: Composition) -> Iterator[tuple[KeyPath, Mapping[str, Any]]]:
    """Yield every node with a `_target_` of its own, with its path."""
    for group in GROUPS:
        value = composition.values.get(group) or {}
        inner = value.items() if group in LIST_GROUPS and isinstance(value, Mapping) else ()
        nodes = [((group, name), node) for name, node in inner] if group in LIST_GROUPS else [((group,), value)]
        yield from ((path, node) for path, node in nodes if isinstance(node, Mapping) and TARGET in node)


def _deduplicated(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems without repetitions, in order."""
    return list({str(problem): problem for problem in problems}.values())


def _leaf_problems(composition: Composition) -> Iterator[Problem]:
    """Yield what no key of any class takes: no value, integers beyond the 64 bits that tensors and counters need, and
    paths that no file system accepts.
    """
    for path, value in leaves(composition.values):
        if value == "???":
            yield composition.problem(path, f"{NEEDS_VALUE} {dotted(path)}=VALUE.", show_value=False)
        elif isinstance(value, str):
            if is_path_key(path[-1]) and (rule := path_rule(value)):
                yield composition.problem(path, rule, value=value)
        elif not all(-(2**63) <= number < 2**63 for number in _integers_in(value)):
            yield composition.problem(path, "must fit into 64 bits: less than 2**63.", value=value)
    if composition.run_dir is not None and (rule := path_rule(str(composition.run_dir.absolute()))):
        yield Problem(key="hydra.run.dir", value=str(composition.run_dir), rule=rule)


def _unusable_folders(composition: Composition) -> Iterator[Problem]:
    """Yield a problem for each folder of the command line that is empty text or has a file in its place."""
    for argument in composition.hydra_overrides:
        key, _, value = argument.lstrip("+").partition("=")
        if key in ("hydra.run.dir", "hydra.sweep.dir"):
            value = value.strip("'\"")
            if not path_rule(value) and (rule := folder_rule(value)):  # `paths_too_long` reports the others
                yield Problem(key=key, value=value, rule=rule, origin=COMMAND_LINE)


def folder_rule(text: str) -> str | None:
    """Return why a path cannot be the folder of a run; None if it can."""
    if not text or (rule := path_rule(text)):
        return rule if text else "is empty. Name a folder."
    file = file_in_the_way(Path(expanded(text)))
    return None if file is None else f"{file} is no folder."


def _integers_in(value: Any) -> list[int]:
    if isinstance(value, list | Mapping):
        inner = value.values() if isinstance(value, Mapping) else value
        return [number for item in inner for number in _integers_in(item)]
    return [value] if isinstance(value, int) else []
