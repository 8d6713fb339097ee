"""Compose runs: merge arguments and files into values with their origins."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Final

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException

from trainkit.config.compose.files import (
    CONFIG,
    Repository,
    SearchPath,
    group_in,
    hydra_choices_of,
    hydra_state,
    is_key_of_hydra,
    submits_single_runs,
)
from trainkit.config.compose.hydra_adapter import DefaultsList, create_defaults_list
from trainkit.config.compose.layers import Layers, shown
from trainkit.config.compose.space import Space, read_space
from trainkit.config.composition import Composition, ConfigFile, KeyPath, Level, Origin, TrackedTree, dotted, lookup
from trainkit.config.door import advice, own_folder
from trainkit.config.grammar import COMMAND_LINE, key_of
from trainkit.config.schema import GROUPS, LIST_GROUPS, RunConfig, hints_of
from trainkit.config.secrets import remember_secrets
from trainkit.config.targets.allowed import TARGET, allow_packages
from trainkit.config.targets.build import resolve_target, signature_of
from trainkit.config.values import closest, plain
from trainkit.config.yaml_files import Document, read_document, shipped_conf, shipped_recipes
from trainkit.errors import ConfigError, Problem, first_line
from trainkit.redaction import REDACTED, redacted_argument, remember

_NOT_OF_HYDRA: Final[Mapping[KeyPath, str]] = {
    (
        "hydra",
        "job",
        "chdir",
    ): "is not supported: relative paths are found in the folder where the training was started, and "
    "its files are in its run folder. Leave it out.",
    ("hydra", "searchpath"): "is not read. Give the folder of your own YAMLs: {folder}.",
}
"""Key of Hydra -> why it has no effect."""
_ARGUMENT: Final = Origin(level=Level.command_line, where=COMMAND_LINE)


class Composer(SearchPath):
    """Composes runs from one search path."""

    def compose(self, overrides: Sequence[str] = (), *, for_others: bool = False) -> Composition:
        """Compose one run.

        With `for_others`, arguments may be meant for other choices that are composed too: keys of a group that this
        choice does not have, but another choice has, are then left out, with a note.
        """
        with hydra_state():
            composition = CompositionBuilder(self, overrides).run()
            if for_others and (foreign := foreign_keys(composition)):
                kept = [line for line in overrides if key_of(line) not in foreign]
                composition = CompositionBuilder(self, kept).run()
                texts = (
                    f"{key}: left out, {composition.choices[key.partition('.')[0]]} has no such key" for key in foreign
                )
                composition = composition.with_notes(sorted(texts))
        return composition

    def space(self, overrides: Sequence[str]) -> Space:
        """Return the arguments that all points of a sweep share, and the axes along which the points differ.

        Raises:
            ConfigError: an argument cannot be parsed, or a sweep cannot be searched.
        """
        with hydra_state():
            parsed, problems = self.parse(overrides)
            if problems := problems or repeated(parsed):
                raise ConfigError(problems)
            return read_space(parsed)

    def points(self, overrides: Sequence[str]) -> list[list[str]]:
        """Return the arguments of every point of a grid, in order; a single point where nothing is swept.

        Raises:
            ConfigError: an argument cannot be parsed, or the points of a sweep cannot be enumerated.
        """
        return self.space(overrides).grid()


def foreign_keys(composition: Composition) -> set[str]:
    """Return keys of the command line that the selected choices lack and other choices of their groups have."""
    found = set()
    for path, origin in composition.origins.items():
        file = next((item for item in composition.files if item.package == path[:1]), None)
        if origin.level is not Level.command_line or len(path) < 2 or file is None or path[1] in file.document.values:
            continue
        folders = (*composition.config_dirs, shipped_conf())
        others = [other for folder in folders for other in sorted((folder / path[0]).glob("*.yaml"))]
        if any(path[1] in read_document(other).values for other in others) and not _takes(composition, file, path[1]):
            found.add(dotted(path))
    return found


def _takes(composition: Composition, file: ConfigFile, key: str) -> bool:
    """Return whether the class of a group takes a key that the file of its choice leaves out."""
    target = lookup(composition.values, (*file.package, TARGET))
    if not isinstance(target, str) or (file.shipped and target == file.document.values.get(TARGET)):
        return False  # files of shipped choices list every key
    try:
        with allow_packages(composition.packages):
            signature = signature_of(resolve_target(target))
    except Exception:  # noqa: BLE001 - the check reports it, whatever a module of the user raises
        return True
    return signature.takes_more or key in signature.keys


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
        The composition; its `problems` lists the errors.
    """
    return Composer(config_dirs, packages).compose(overrides)


class CompositionBuilder:
    """Collects the state of one composition while it is built."""

    def __init__(self, composer: SearchPath, overrides: Sequence[str]) -> None:
        self.composer = composer
        self.repository = Repository(composer.loader.repository)
        self.given = tuple(overrides)
        self.parsed, self.problems = composer.parse(overrides)
        self.problems += repeated(self.parsed)
        self.layers = Layers()

    def run(self) -> Composition:
        """Compose: defaults list, layers, arguments, exclusive keys, interpolations."""
        own = [item for item in self.parsed if not item.is_hydra_override()]
        about_hydra = [item for item in self.parsed if item.is_hydra_override() and not self._refused_of_hydra(item)]
        task = [item for item in own if not self._refused(item)]
        defaults = self._defaults([*task, *self._no_default_recipe(task)])
        files = self._files(defaults)
        self.problems += self._several()
        choices = self._choices(defaults, files)
        swapped = self._swapped(task, files, choices)
        layers = self.layers
        layers.merge(files, swapped)
        hydra = copy.deepcopy(layers.hydra.values.get("hydra", {}))
        for override in defaults.config_overrides:
            self._apply(override, layers.tree)
        for override in about_hydra:
            if "." in override.key_or_group:
                self._apply(override, layers.hydra)
        self._refuse_settings_of_hydra()
        self._remember_arguments()
        values = layers.finish(files, choices, self.composer.packages)
        remember_secrets(values)
        run_dir = layers.folder(lookup(layers.hydra.values, ("hydra", "run", "dir")), values)
        return Composition(
            values=values,
            origins=dict(layers.tree.origins),
            choices=choices,
            files=tuple(files),
            overrides=tuple(item.input_line or "" for item in own),
            given=tuple(item.key_or_group for item in own),
            hydra_overrides=tuple(item.input_line or "" for item in about_hydra),
            hydra=hydra,
            hydra_choices=(hydra_choices := hydra_choices_of(files)),
            launcher_takes_single_runs=submits_single_runs(hydra_choices["hydra/launcher"]),
            config_dirs=self.composer.config_dirs,
            packages=self.composer.packages,
            notes=tuple(layers.notes),
            variables=layers.variables,
            problems=(*self.problems, *layers.problems),
            run_dir=run_dir,
            run_dir_given=layers.hydra.origin_of(("hydra", "run", "dir")).level > Level.defaults,
        )

    def _remember_arguments(self) -> None:
        """Register secrets in arguments, even in ones that cannot be parsed, so that no message quotes them."""
        for argument in self.given:
            if redacted_argument(argument).endswith(f"={REDACTED}"):
                remember(argument.partition("=")[2].strip("'\""))

    # -- the arguments ------------------------------------------------------------------------------------------

    def _refused(self, override: Override) -> bool:
        """Report an argument that no defaults list can take; return True if there was a problem."""
        key, text = override.key_or_group, (override.input_line or "").partition("=")[2]
        value = None if override.is_sweep_override() else override.value()
        of_ours = key not in LIST_GROUPS and key in (*GROUPS, "recipe", "experiment")
        if key == "hydra":
            rule = "is the node of Hydra itself. Give its keys: hydra.run.dir=DIR."
        elif override.is_sweep_override():
            several = advice("which trainkit -m trains one after the other", "and one call trains one of them")
            rule = f"is a list of choices, {several}. As one text: {key}='...'."
        elif not self.composer.is_group(override):
            return False
        elif override.package is not None:
            rule = f"takes no @package: the choice of a group stands at its own key. Write {key}={text}."
        elif override.is_delete() and key in LIST_GROUPS and text:
            rule = f"removes all {key}, without a value. One of them: ~{key}.NAME."
        elif isinstance(value, list) and key not in LIST_GROUPS:
            rule = f"takes one choice, not a list. To run them all: -m {key}={','.join(map(str, value))}."
        elif override.is_force_add() or (override.is_add() and of_ours):
            rule = f"is a group: write {key}={text}."
        elif not isinstance(value, str | list | None) and not override.is_delete():
            rule = f"needs the name of a choice. {self._there_are(key)}"
        else:
            names = [] if override.is_delete() else value if isinstance(value, list) else [value]
            absent = [name for name in names if not self._exists(key, name)]
            for name in absent:
                self._report(override, self._no_choice(key, str(name)))
            return bool(absent)
        self._report(override, rule)
        return True

    def _refused_of_hydra(self, override: Override) -> bool:
        """Report an argument that Hydra would ignore or could not read; return True if there was a problem."""
        key = override.key_or_group
        if override.is_delete():
            self._report(override, f"belongs to Hydra and cannot be deleted. Give a value: {key}=VALUE.")
        elif override.is_sweep_override():
            self._report(override, f"is a list of choices. As one text: {key}='...'.")
        elif "/" not in key and not is_key_of_hydra(key):
            self._report(override, "is no key of Hydra. trainkit --cfg hydra shows them.")
        else:
            return False
        return True

    def _refuse_settings_of_hydra(self) -> None:
        """Report what Hydra would do around a task and trainkit does not do."""
        for path, rule in _NOT_OF_HYDRA.items():
            if value := lookup(self.layers.hydra.values, path):
                where = self.layers.hydra.origin_of(path).where
                told = rule.format(folder=own_folder())
                self.problems.append(Problem(key=dotted(path), value=value, rule=told, origin=where))

    def _report(self, override: Override, rule: str) -> None:
        line = override.input_line or ""
        name, separator, value = line.lstrip("+").partition("=")
        found = {"value": value} if separator else {}
        self.problems.append(Problem(key=name, rule=rule, origin=COMMAND_LINE, **found))

    def _exists(self, group: str, name: Any) -> bool:
        return name is None or (isinstance(name, str) and self.repository.config_exists(f"{group}/{name}"))

    def _no_choice(self, group: str, name: str) -> str:
        near = closest(name, self.composer.choices_of(group))
        hint = f"Did you mean {near}? " if near else ""
        return f"no such choice. {hint}{self._there_are(group)}"

    def _there_are(self, group: str) -> str:
        if not self.composer.choices_of(group):
            return f"There is no group {group}; there are: {', '.join(self.composer.groups())}."
        return f"There are: {', '.join(self.composer.choices_of(group))}."

    # -- the files ----------------------------------------------------------------------------------------------

    def _defaults(self, task: Sequence[Override]) -> DefaultsList:
        """Return Hydra's defaults list; report every choice that a file names and that does not exist."""
        remaining = [self.composer.without_null(item) for item in task]
        while True:
            self.repository.begin_list()
            try:
                return create_defaults_list(self.repository, CONFIG, list(remaining), False, False)
            except RecursionError:
                raise ConfigError([*self.problems, self.repository.cycle_problem()]) from None
            except MissingConfigException as error:
                missing = error.missing_cfg_file or ""
                if missing in self.repository.absent or missing == CONFIG:
                    raise ConfigError([*self.problems, Problem(key=missing, rule=first_line(error))]) from error
                self.problems.append(self._missing(missing))
                self.repository.mark_absent(missing)
            except (HydraException, ValueError, OmegaConfBaseException) as error:
                named = [item for item in remaining if item.get_key_element() in str(error)]
                named += [item for item in remaining if item.key_or_group in str(error)]
                culprit, rule = next(iter(named), None), first_line(error)
                if culprit is not None and culprit.is_delete():
                    rule = "is not the choice of this group, so it cannot be deleted."
                elif culprit is not None and self.composer.is_group(culprit) and not culprit.is_add():
                    rule = f"is not in the defaults list. To add it: +{culprit.input_line}."
                if culprit is None:
                    raise ConfigError([*self.problems, Problem(key="defaults list", rule=rule)]) from error
                self._report(culprit, rule)
                remaining.remove(culprit)

    def _missing(self, config_path: str) -> Problem:
        """Return the problem of a missing choice, with the line that names it."""
        group, _, name = config_path.rpartition("/")
        for document in self.repository.documents.values():
            for item, line in zip(document.defaults, document.defaults_lines, strict=False):
                pairs = item.items() if isinstance(item, Mapping) else ()
                if any(group_in(str(key)) == group and name in _names(value) for key, value in pairs):
                    where = f"{shown(document.file)}:{line}"
                    return Problem(key=group, value=name, rule=self._no_choice(group, name), origin=where)
        return Problem(key=group or config_path, value=name, rule=self._no_choice(group, name))

    def _several(self) -> Iterator[Problem]:
        """Yield problems of lists of choices that files give to a group of one choice; Hydra would merge them."""
        for document in self.repository.documents.values():
            for item, line in zip(document.defaults, document.defaults_lines, strict=False):
                for key, value in item.items() if isinstance(item, Mapping) else ():
                    group = group_in(str(key))
                    if isinstance(value, list) and group in GROUPS and group not in LIST_GROUPS:
                        where = f"{shown(document.file)}:{line}"
                        yield Problem(key=group, value=value, rule="takes one choice, not a list.", origin=where)

    def _files(self, defaults: DefaultsList) -> list[ConfigFile]:
        """Return the files in ascending precedence: config.yaml, choices, recipes, experiments."""
        files = []
        shipped = (shipped_conf(), shipped_recipes())
        for default in defaults.defaults:
            path = default.config_path or ""
            group, _, name = path.rpartition("/")
            level = Level.choice
            if path == CONFIG:
                level = Level.defaults
            elif path.startswith(("recipe/", "experiment/")):
                level = Level.recipe if path.startswith("recipe/") else Level.experiment
            document = self.repository.documents[path]
            package = tuple(part for part in (default.package or "").split(".") if part and part != "_global_")
            own = any(document.file.is_relative_to(folder) for folder in shipped)
            files.append(
                ConfigFile(group=group, name=name, package=package, level=level, document=document, shipped=own)
            )
        return sorted(files, key=lambda file: file.level)

    def _choices(self, defaults: DefaultsList, files: Sequence[ConfigFile]) -> dict[str, str | list[str] | None]:
        known: dict[str, Any] = dict(defaults.overrides.known_choices)
        for group in LIST_GROUPS:
            known[group] = [*dict.fromkeys(file.name for file in files if file.group == group)]
        return {name: known[name] for name in sorted(known)}

    def _swapped(
        self, task: Sequence[Override], files: Sequence[ConfigFile], choices: Mapping[str, Any]
    ) -> dict[Level, dict[str, str]]:
        """Return level -> group -> note, for groups whose choice in a recipe or experiment was replaced from above."""
        arguments = {item.key_or_group: str(item.input_line) for item in task if self.composer.is_group(item)}
        primary, recipes, experiments = (
            [file.document for file in reversed(files) if file.level == level]
            for level in (Level.defaults, Level.recipe, Level.experiment)
        )
        own = {group: "the experiment" for group in GROUPS if [*_chosen_in(experiments, group)]}
        sources = {
            Level.recipe: ([*recipes, *primary], {**own, **arguments}),
            Level.experiment: ([*experiments, *recipes, *primary], arguments),
        }
        swapped: dict[Level, dict[str, str]] = {level: {} for level in sources}
        for level, (documents, labels) in sources.items():
            for group in labels.keys() - {"recipe", "experiment"}:
                before = next(_named_in(documents, group), None)
                if _names(before) != _names(choices.get(group)):
                    swapped[level][group] = f"{labels[group]} replaces {'+'.join(_names(before)) or 'nothing'}"
        return swapped

    def _no_default_recipe(self, task: Sequence[Override]) -> list[Override]:
        """Return the argument that leaves the default recipe out: an experiment is composed over the defaults alone,
        unless it or the command line names a recipe.
        """
        names = [str(item.value()) for item in task if item.key_or_group == "experiment" and not item.is_delete()]
        if not names or any(item.key_or_group == "recipe" for item in task):
            return []
        self.repository.load_config(f"experiment/{names[0]}")
        document = self.repository.documents.get(f"experiment/{names[0]}")
        if document is None or [*_chosen_in([document], "recipe")]:
            return []
        return self.composer.parse(["recipe=null"])[0]

    def _apply(self, override: Override, tree: TrackedTree) -> None:
        """Merge one argument over the values of the files."""
        path = tuple(override.key_or_group.split("."))
        if override.package is not None:
            self._report(override, f"{override.key_or_group} is not a group, so it takes no @package.")
        elif override.is_delete():
            if _is_of_schema(path) and path in tree.origins:
                name = f"{dotted(path)}.KEY" if isinstance(lookup(tree.values, path), Mapping) else dotted(path)
                self._report(override, f"belongs to every run and cannot be deleted. Give a value: {name}=VALUE.")
            elif "=" in (override.input_line or "") and override.value() != lookup(tree.values, path):
                rule = f"is not deleted: its value is {lookup(tree.values, path)}. Without a value: ~{dotted(path)}."
                self._report(override, rule)
            elif not tree.remove(path):
                self._report(override, "there is no such key to delete.")
        else:
            value = override.value()
            if value == {} and isinstance(lookup(tree.values, path), Mapping) and _is_section(path):
                rule = f"belongs to every run and cannot be cleared. Give values: {dotted(path)}.KEY=VALUE."
                self._report(override, rule)
                return
            if value == {}:
                tree.remove(path)  # merging an empty mapping would change nothing, but it means to clear the node
            tree.put(path, value, _ARGUMENT)


def _is_section(path: KeyPath) -> bool:
    hint = hints_of(RunConfig).get(path[0])
    return len(path) == 1 and path[0] not in GROUPS and is_dataclass(plain(hint))


def _is_of_schema(path: KeyPath) -> bool:
    """Return whether every run has a key; below `optimizers` the names are the user's."""
    hint = hints_of(RunConfig).get(path[0])
    return hint is not None and path[0] not in GROUPS and (len(path) == 1 or is_dataclass(plain(hint)))


def _names(value: Any) -> list[str]:
    if value is None:
        return []
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def _chosen_in(documents: Sequence[Document], group: str) -> Iterator[Any]:
    """Yield the choices that the defaults lists of documents make for a group, first document first."""
    for item in itertools.chain.from_iterable(document.defaults for document in documents):
        if isinstance(item, Mapping):
            yield from (value for key, value in item.items() if group_in(str(key)) == group)


def _named_in(documents: Sequence[Document], group: str) -> Iterator[Any]:
    """Yield what documents choose for a group, first document first: a class named by `_target_`, or choices."""
    for document in documents:
        node = document.values.get(group)
        if group not in LIST_GROUPS and isinstance(node, Mapping) and "_target_" in node:
            yield node["_target_"]
        yield from _chosen_in([document], group)


def repeated(arguments: Sequence[Override]) -> list[Problem]:
    """Return a problem for each key or group that several arguments give: their order would decide which one counts.

    `optimizer=adamw optimizer.lr=1` names a group and one of its keys, each once. A mapping names every key in it.
    """
    givers: dict[str, list[str]] = {}
    for argument in arguments:
        for key in dict.fromkeys(_keys(argument)):
            givers.setdefault(key, []).append(redacted_argument(argument.input_line or ""))
    return [
        Problem(key=key, rule=f"is given {_times(len(lines))}: {_listed(lines)}. Give it once.", origin=COMMAND_LINE)
        for key, lines in givers.items()
        if len(lines) > 1
    ]


def _keys(argument: Override) -> Iterator[str]:
    name = argument.key_or_group if argument.package is None else f"{argument.key_or_group}@{argument.package}"
    value = None if argument.is_sweep_override() or argument.is_delete() else argument.value()
    if isinstance(value, Mapping) and value:
        yield from _inner(name, value)
    else:
        yield name


def _inner(name: str, value: Mapping[Any, Any]) -> Iterator[str]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _inner(f"{name}.{key}", item)
        else:
            yield f"{name}.{key}"


def _times(count: int) -> str:
    return "twice" if count == 2 else f"{count} times"


def _listed(lines: Sequence[str]) -> str:
    shown = [line if len(line) <= 60 else f"{line[:57]}..." for line in lines[:4]]
    return ", ".join(shown[:-1]) + f" and {shown[-1]}" if len(lines) <= 4 else ", ".join(shown) + " and others"
