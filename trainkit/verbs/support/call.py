"""The parsers of the verbs, and the parsed command line."""

from __future__ import annotations

import os
import re
import sys
from argparse import SUPPRESS, Action, ArgumentError, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainkit.config.grammar import COMMAND_LINE, is_override
from trainkit.config.values import closest, nearest, path_rule
from trainkit.errors import MISSING, ConfigError, Problem, refuse
from trainkit.report.json_output import print_json
from trainkit.verbs.support.one_file import arguments_of
from trainkit.verbs.support.project import Project, find_project
from trainkit.verbs.support.table import VERBS, one_of

if TYPE_CHECKING:
    from trainkit.config.composition import Composition
    from trainkit.config.schema import RunConfig
    from trainkit.data.splits import DeclaredData

_REFUSED: Final = {
    ("-cn", "--config-name"): "there is only one primary config. A recipe describes a whole training: recipe=NAME.",
    ("-cp", "--config-path"): "your own folder of YAMLs comes first on the search path: --config-dir DIR.",
    ("-r", "--run"): "without a flag, trainkit runs.",
    ("-i", "--info"): "trainkit explain KEY shows the origin of a value; trainkit ls lists the choices.",
    ("--hydra-help",): "Hydra's own settings are keys, hydra.run.dir=DIR; --cfg hydra shows them.",
    ("-p", "--package"): "trainkit explain KEY shows a part of the config.",
    ("--resolve",): "--cfg already shows the resolved config.",
    ("--experimental-rerun",): "trainkit resume RUN continues a run.",
}
"""Flags of Hydra, and what serves here."""
_COMMON_FLAGS: Final = (
    "help", "version", "multirun", "config-dir", "allow-package", "no-project", "cfg", "shell-completion"
)  # fmt: skip


class _Once(Action):
    """Store the value of a flag, which is given once."""

    def __call__(self, _: Any, namespace: Namespace, value: Any, *_name: Any) -> None:
        if hasattr(namespace, self.dest):
            raise ArgumentError(self, f"is given twice, also as {value}. Give it once.")
        setattr(namespace, self.dest, value)


class _Refused(Action):
    """Refuse a flag of Hydra."""

    def __call__(self, *_: Any) -> None:
        raise ArgumentError(self, f"is Hydra's, and not needed here: {self.const}")


def module_of(verb: str) -> Any:
    """Return the module of a verb, imported now."""
    return import_module(f"trainkit.verbs.{VERBS[verb].folder}.{verb}")


def parser_of(verb: str | None) -> tuple[ArgumentParser, dict[str, Action]]:
    """Return the parser of a verb, or of a line that names none, and its flags by name."""
    spec = VERBS.get(verb or "")
    about = "One config, the same training anywhere. Without a verb it trains; without arguments, on the digits."
    parser = ArgumentParser(
        prog="trainkit",
        usage=f"trainkit {verb} {spec.usage}" if spec else "trainkit [VERB] [ARGUMENTS] [--flags] OVERRIDES",
        description=f"{spec.about}\n\nexample: trainkit {verb} {spec.example}" if spec else about,
        epilog=None if spec else _EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
        argument_default=SUPPRESS,
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
    )
    actions = dict[str, Action]()
    group = parser.add_argument_group("flags")

    def add(*names: str, **settings: Any) -> None:
        action = group.add_argument(*names, **settings)
        actions[names[-1].removeprefix("--")] = action

    parser.register("action", None, _Once)
    if spec and spec.flags:
        for name, about, reader in spec.flags:
            flag, _, metavar = name.partition(" ")
            settings = {"metavar": metavar, "type": reader} if metavar else {"action": "store_true"}
            add(flag, help=about, **settings)
        group = parser.add_argument_group("flags of every verb")
    add("-h", "--help", action="store_true", help="show this, or the help of the verb")
    add("-V", "--version", action="store_true", help="show the version")
    add("-m", "--multirun", action="store_true", help="train: run every combination of comma lists, a=1,2 b=x,y")
    about = "a folder of your own YAML files, GROUP/CHOICE.yaml; it is searched first"
    add("-cd", "--config-dir", metavar="DIR", action="append", help=about)
    about = "trust this package: _target_ may name its classes and functions"
    add("--allow-package", metavar="PKG", action="append", help=about)
    add("--no-project", action="store_true", help="leave out [tool.trainkit] of the pyproject.toml here or above")
    about = "print the composed config and stop: job, hydra or all"
    add("-c", "--cfg", metavar="WHICH", type=one_of("job", "hydra", "all"), help=about)
    about = 'install completion: eval "$(trainkit -sc install=bash)"'
    add("-sc", "--shell-completion", metavar="install=SHELL", help=about)
    for names, instead in _REFUSED.items():
        parser.add_argument(*names, action=_Refused, nargs="?", const=instead, help=SUPPRESS)
    return parser, actions


_EPILOG: Final = "\n".join(
    [
        "verbs:",
        *(f"  {name:<{max(map(len, VERBS))}}  {verb.about}" for name, verb in VERBS.items()),
        "",
        "examples:",
        "  trainkit                                       train an MLP on digits",
        "  trainkit strategy=mirrored                     the same training on every device",
        "  trainkit recipe=null model=mlp epochs=3 optimizer.lr=0.003",
        "  trainkit -m optimizer.lr=0.01,0.003            train with both, and rank the runs",
        "",
        "overrides: group=choice selects a YAML file (trainkit ls), key=value sets a value (trainkit explain KEY),",
        "~key removes a key. Quote a value with spaces or special characters: 'data.path=\"~/my data\"'.",
    ]
)


def parsed(verb: str | None, words: Iterable[str]) -> tuple[dict[str, Any], list[str], list[Problem]]:
    """Return the flags among some words, all other words, and the problems of the flags."""
    parser, actions = parser_of(verb)
    words, problems = list(words), list[Problem]()
    while True:
        try:
            namespace, others = parser.parse_known_args(words)
        except ArgumentError as error:  # argparse stops at the first one: take it out, and go on
            problems.append(_drop_refused(words, error, actions))
        else:
            break
    for word in [other for other in others if other.startswith("-") and len(other) > 1]:
        near = closest(word.lstrip("-").partition("=")[0], actions)
        rule = "no such flag." + (f" Did you mean --{near}?" if near else " trainkit --help shows them.")
        problems.append(Problem(key=word, rule=rule, origin=COMMAND_LINE))
        others.remove(word)
    return {name.replace("_", "-"): value for name, value in vars(namespace).items()}, others, problems


def _drop_refused(words: list[str], error: ArgumentError, actions: Mapping[str, Action]) -> Problem:
    """Remove the flag that argparse refuses, with its value; return its problem."""
    names = str(error.argument_name).split("/")
    index = next(index for index, word in enumerate(words) if word.partition("=")[0] in names)
    word, has_value, value = words.pop(index).partition("=")
    flag = names[-1].removeprefix("--")
    action = actions.get(flag)
    if action is not None and action.nargs == 0:
        rule = f"--{flag} takes no value."
    else:
        if action is not None and not has_value and index < len(words):
            value = words.pop(index)
        rule = error.message if value or action is None else f"needs a value: --{flag} {action.metavar}."
    return Problem(key=word, value=value or MISSING, rule=rule, origin=COMMAND_LINE)


def verb_of(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the verb, None without one, and all other words.

    Flags may stand before the verb: it is the first verb with nothing but its flags, their values and overrides
    before it.
    """
    for index, word in enumerate(words):
        if word in VERBS:
            _, others, problems = parsed(word, words[:index])
            if all(map(is_override, others)) and not any(problem.value is MISSING for problem in problems):
                return word, [*words[:index], *words[index + 1 :]]
    return None, list(words)


def parse(words: Sequence[str]) -> tuple[Call, dict[str, Any]]:
    """Parse a command line.

    Returns:
        The call, and the flags that belong to no verb: help, version, cfg, shell-completion.

    Raises:
        ConfigError: every flag that is unknown, lacks its value or has a wrong one.

    Example:
        >>> call, _ = parse(["-m", "train", "optimizer.lr=1,2"])
        >>> call.verb, call.multirun, call.overrides
        ('train', True, ('optimizer.lr=1,2',))
    """
    verb, rest = verb_of(words)
    end = rest.index("--") if "--" in rest else len(rest)
    flags, others, problems = parsed(verb, rest[:end])
    bare, overrides = list[str](), list[str]()
    for word in others:
        is_side = not word and verb == "compare"  # a set without overrides
        if (is_override(word) or is_side) and not (verb and len(bare) < VERBS[verb].paths and os.path.lexists(word)):
            overrides.append(word)
        else:
            literal = str(Path(word)).startswith("~") and os.path.lexists(word)  # no user's home
            bare.append(str(Path(word).absolute()) if literal else word)
    bare += rest[end + 1 :]
    folders = flags.get("config-dir", ())
    broken = [(path, rule) for path in (*bare, *folders) if (rule := path_rule(path))]
    problems += [Problem(key=path, rule=rule, origin=COMMAND_LINE) for path, rule in broken]
    packages = [name for text in flags.get("allow-package", ()) for name in text.split(",")]
    has_all = True  # else its keys cannot be judged
    project, file = None, next((word for word in bare if word.endswith(".py")), None)
    try:
        project = None if "no-project" in flags else find_project(Path.cwd())
    except ConfigError as error:
        problems, has_all = [*problems, *error.problems], False
    if file is not None and VERBS[verb or "train"].composes:
        bare.remove(file)
        try:
            implied, package = arguments_of(file, overrides)
            overrides, packages = [*implied, *overrides], [*packages, package]
        except ConfigError as error:
            problems, has_all = [*problems, *error.problems], False
    else:
        file = None
    if verb is None and bare and not problems:
        is_key = re.fullmatch(r"[a-z_]+(\.\w+)+", bare[0]) is not None
        rule = f"needs a value: {bare[0]}=VALUE." if is_key else f"no such verb. {nearest(bare[0], VERBS)}"
        problems.append(Problem(key=bare[0], rule=rule, origin=COMMAND_LINE))
    if "multirun" in flags and verb not in (None, "train"):
        rule = f"belongs to train. {verb} compares the choices of a comma list without it."
        problems.append(Problem(key="-m", rule=rule, origin=COMMAND_LINE))
    config_dirs = [Path(folder).expanduser().absolute() for folder in folders]
    call = Call(
        verb=verb or "train",
        arguments=tuple(bare),
        flags={name: value for name, value in flags.items() if name not in _COMMON_FLAGS},
        overrides=tuple(overrides),
        config_dirs=tuple(dict.fromkeys([*config_dirs, *(project.config_dirs if project else ())])),
        packages=tuple(dict.fromkeys([*packages, *(project.packages if project else ())])),
        project=project,
        file=None if file is None else Path(file),
        multirun="multirun" in flags,
    )
    spec = VERBS[call.verb]
    if spec.arguments is not None and "cfg" not in flags and not problems:
        problems += call.arity_problems(spec.arguments, overrides=spec.overrides)
    if problems:
        problems += call.package_problems()
        raise ConfigError([*problems, *(call.key_problems() if spec.composes and has_all else ())])
    return call, {name: value for name, value in flags.items() if name in _COMMON_FLAGS}


@dataclass(frozen=True, kw_only=True)
class Call:
    """The parsed command line."""

    verb: str = "train"
    arguments: tuple[str, ...] = ()
    """Plain words after the verb."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """The verb's own flags that are given, by name without dashes; True for a flag without a value."""
    overrides: tuple[str, ...] = ()
    """`key=value` and similar arguments."""
    config_dirs: tuple[Path, ...] = ()
    packages: tuple[str, ...] = ()
    multirun: bool = False
    project: Project | None = None
    """The project whose folders and packages these are, too."""
    file: Path | None = None
    """The file that is trained, whose parts the overrides name."""

    @property
    def command(self) -> str:
        """Return this call as a command that a user can paste."""
        words = [Path(word).expanduser() if VERBS[self.verb].paths else word for word in self.arguments]
        flags = [part for name, value in self.flags.items() for part in (f"--{name}", value) if part is not True]
        return self.printed(self.verb, [*words, *self.overrides, *map(str, flags)])

    def printed(self, verb: str, words: Iterable[str | Path]) -> str:
        """Return a command with the config folders and packages of this call; `verb` is empty for a training."""
        from trainkit.config.commands import printed_command  # noqa: PLC0415 - where one is printed only

        return printed_command(verb, words, config_dirs=self.config_dirs, packages=self.packages)

    def compose(self, *, may_lack: str | None = None, reads_files: bool = True) -> Composition:
        """Compose and check, both phases.

        Args:
            may_lack: a group whose required keys may be unset, because nothing is read; each is then a note.
            reads_files: whether the files that keys name must exist here.

        Raises:
            ConfigError: the problems of both phases.
        """
        from trainkit.config.check import checked, checked_without  # noqa: PLC0415 - a verb may compose nothing
        from trainkit.config.compose import compose  # noqa: PLC0415

        composition = compose(self.overrides, config_dirs=self.config_dirs, packages=self.packages)
        composition = replace(composition, reads_files=reads_files and may_lack is None)
        return checked(composition) if may_lack is None else checked_without(composition, may_lack)

    def compose_points(self) -> list[Composition]:
        """Compose and check every combination of the comma lists; a group's keys apply to the choices that have them.

        Raises:
            ConfigError: the problems of all points, before any is used.
        """
        from trainkit.verbs.support.points import checked_points  # noqa: PLC0415

        return checked_points(self.overrides, self.config_dirs, self.packages)

    def package_problems(self) -> list[Problem]:
        """Return the problems of the packages that are allowed."""
        from trainkit.config.targets.allowed import importable, refuse_packages  # noqa: PLC0415 - for an error only

        try:
            with importable(self.project.code if self.project else ()):
                refuse_packages(self.packages)
        except ConfigError as error:
            return list(error.problems)
        return []

    def key_problems(self) -> list[Problem]:
        """Return the problems of the keys that are found without importing a class; absent values are no problem."""
        from trainkit.verbs.support.points import key_problems  # noqa: PLC0415 - as above

        return key_problems(self.overrides, self.config_dirs, self.packages, sweeps=self.multirun)

    def problem(self, flag: str, rule: str) -> Problem:
        """Return a problem of a flag of this call, which may be missing.

        Example:
            >>> str(Call(flags={"k": "0"}).problem("k", "must be 1 or more."))
            '--k=0: must be 1 or more. (command line)'
        """
        value = self.flags.get(flag, True)
        return Problem(key=f"--{flag}", value=MISSING if value is True else value, rule=rule, origin=COMMAND_LINE)

    def arity_problems(self, arguments: tuple[int, float], *, overrides: bool = True) -> Iterator[Problem]:
        """Yield the problem of too few or too many arguments, and that of overrides for a verb that takes none."""
        if not arguments[0] <= len(self.arguments) <= arguments[1]:
            count = arguments[len(self.arguments) > arguments[0]]
            rule = f"takes {count} argument{'' if count == 1 else 's'}, and got {', '.join(self.arguments) or 'none'}."
            hint = " Set a key by key=value." if self.arguments else f" See trainkit {self.verb} --help."
            if overrides and self.overrides and len(self.arguments) < count:
                hint += " A path with = in it begins with / or ./."
            yield Problem(key=self.verb, rule=rule + hint, origin=COMMAND_LINE)
        elif self.overrides and not overrides:
            yield Problem(key=self.verb, rule="takes no key=value.", origin=COMMAND_LINE)

    def check_arity(self, least: int = 0, most: int = 0, *, overrides: bool = True) -> None:
        """Refuse arguments that this verb does not take with these flags.

        Raises:
            ConfigError: too many or too few arguments, or overrides.
        """
        refuse(self.arity_problems((least, most), overrides=overrides))

    def show(self, document: Mapping[str, Any], lines: Iterable[str]) -> None:
        """Print the document of this call with `--json`, else its lines."""
        if "json" in self.flags:
            print_json(document)
        else:
            sys.stdout.writelines(f"{line}\n" for line in lines)


def declared_for(call: Call, cfg: RunConfig) -> DeclaredData | None:
    """Return the splits that the class of the data declares; None with `--open-data`.

    Raises:
        ConfigError: the class declares another number of samples than `--num-samples`.
    """
    from trainkit.data.splits import declared_data  # noqa: PLC0415 - imports torch

    if "open-data" in call.flags:
        return None
    long = (cfg.batch.global_size or cfg.batch.micro_size or 1) * 1000
    ends = cfg.steps is not None
    return declared_data(cfg.data, cfg.cv, num_samples=call.flags.get("num-samples"), unknown_length=long, ends=ends)
