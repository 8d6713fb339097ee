"""The table of verbs, their parsers, and the parsed command line."""

from __future__ import annotations

import math
import os
from argparse import (
    SUPPRESS,
    Action,
    ArgumentError,
    ArgumentParser,
    ArgumentTypeError,
    Namespace,
    RawDescriptionHelpFormatter,
)
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from trainkit.config.grammar import COMMAND_LINE, is_override, refusal
from trainkit.config.values import closest, nearest, path_rule, whole_number
from trainkit.errors import MISSING, ConfigError, Problem

if TYPE_CHECKING:
    from trainkit.config.composition import Composition
    from trainkit.config.schema import RunConfig
    from trainkit.data.splits import DeclaredData

Add = Callable[..., Action]
"""`add_argument` of a parser."""


class Verb(NamedTuple):
    """One verb, in the module `trainkit.verbs.FOLDER.VERB`."""

    folder: str
    usage: str
    example: str
    about: str
    paths: float = 0
    """Number of paths that it takes. A word with `=` is a path where one is missing and it exists."""


VERBS: Final[Mapping[str, Verb]] = {
    "train": Verb(
        "running", "[-m] OVERRIDES", "recipe=digits strategy=mirrored",
        "train; the default without a verb. -m runs every combination of comma lists"),
    "plan": Verb(
        "looking", "OVERRIDES", "strategy=mirrored strategy.replicas=4",
        "print the whole run without starting it: tasks, batch, rates, memory"),
    "prove": Verb(
        "running", "strategy=A[,B...] OVERRIDES", "strategy=mirrored",
        "compare strategies step by step with one device"),
    "bench": Verb(
        "measuring", "KEY=A,B[,C...] OVERRIDES", "strategy=one_device,mirrored",
        "measure the same training with several choices, in turns"),
    "find": Verb(
        "measuring", "{lr,micro_size} OVERRIDES", "lr optimizer=adamw",
        "find a learning rate or a shard size by measurements"),
    "resume": Verb(
        "running", "RUN [strategy=... stop_at_step=... and other placement; epochs=... to train longer]",
        "RUN strategy=mirrored", "continue a run", 1),
    "explain": Verb(
        "looking", "KEY OVERRIDES, or errors.SECTION", "optimizer.lr",
        "print a key's value, its origin, and the effect of a change"),
    "diff": Verb(
        "looking", "RUN RUN       (run folders or resolved.yaml files)", "RUN RUN",
        "print the differences of two runs that can matter", 2),
    "report": Verb(
        "looking", "RUN | RUN RUN ... | SWEEP", "RUN",
        "write the page of one run, of several runs, or of a sweep", math.inf),
    "top": Verb(
        "looking", "DIR [--then OVERRIDES]", "DIR --k 1 --then strategy=mirrored",
        "list the best runs of a sweep or folder; --then trains the best again", 1),
    "ensemble": Verb(
        "using", "DIR", "DIR --k 3", "combine the best runs into one model, and score it with its members", 1),
    "evaluate": Verb(
        "using", "RUN|FOLDER|FILE [data=... strategy=... and other keys]", "RUN --split val",
        "score a trained model on a split, each sample once", 1),
    "predict": Verb(
        "using", "RUN|FOLDER|FILE --out FILE.parquet|.npy|.jsonl [data=... strategy=... predict.outputs=...]",
        "RUN --out FILE.parquet", "write the model's outputs for every sample, in order", 1),
    "export": Verb(
        "using", "RUN", "RUN --to onnx", "write the trained model into files that need no trainkit", 1),
    "generate": Verb(
        "using", "RUN --prompt TEXT", "RUN --prompt 'To be'", "continue a text with a trained language model", 1),
    "quantize": Verb(
        "using", "RUN --to FORMAT", "RUN --to int8_static",
        "write the trained model in 8 or 4 bits, and compare it", 1),
    "scale": Verb(
        "measuring", "OVERRIDES --to-replicas N, or --simulate --to-replicas N", "strategy=mirrored --to-replicas 64",
        "predict the speedup of more replicas"),
    "advise": Verb(
        "measuring", "[OVERRIDES]", "--devices 8 --hardware h100_sxm",
        "find the best valid way to train on some devices, by plans"),
    "emit": Verb(
        "starting", "{torchrun,slurm,kubernetes,vertex,skypilot,mpirun,tf_config,spec} [--hosts N] [--flags] OVERRIDES",
        "slurm --hosts 2 --gpus-per-host 4",
        "print the script or manifest that starts a run on an engine"),
    "init": Verb("starting", "NAME", "my_package", "write a package of your own that can train at once"),
    "schema": Verb(
        "looking", "[config | NAME]", "config",
        "print the JSON schema of your YAML files, for editors, or of a JSON output"),
    "watch": Verb("looking", "[DIR]", "outputs", "show all runs below a folder, live", 1),
    "ls": Verb(
        "looking", "[GROUP [CHOICE] | RUNS] | --model OVERRIDES", "model",
        "list groups, choices and recipes; the runs of a folder; the layers of a model", 1),
}  # fmt: skip
"""In the order of the help."""

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
_OF_TRAINKIT: Final = ("help", "version", "multirun", "config-dir", "allow-package", "cfg", "shell-completion")


class _Once(Action):
    """Store the value of a flag, which is given once."""

    def __call__(self, _: Any, found: Namespace, value: Any, *_name: Any) -> None:
        if hasattr(found, self.dest):
            raise ArgumentError(self, f"is given twice, also as {value}. Give it once.")
        setattr(found, self.dest, value)


class _Refused(Action):
    """Refuse a flag of Hydra."""

    def __call__(self, *_: Any) -> None:
        raise ArgumentError(self, f"is Hydra's, and not needed here: {self.const}")


def whole(least: int, most: int = 10**9) -> Callable[[str], int]:
    """Return the type of a flag that is a whole number."""

    def read(text: str) -> int:
        number = whole_number(text, low=least, high=most)
        if number is None:
            raise ArgumentTypeError(f"must be a whole number, {least:,} to {most:,}.")
        return number

    return read


def one_of(*words: str) -> Callable[[str], str]:
    """Return the type of a flag that is one of some words."""

    def read(text: str) -> str:
        if text not in words:
            raise ArgumentTypeError(f"must be {', '.join(words[:-1])} or {words[-1]}.")
        return text

    return read


def checkpoint_flag(add: Add, about: str = "the checkpoint of a run: last, or best; last without it") -> None:
    """Add `--checkpoint`."""
    add("--checkpoint", metavar="WHICH", type=one_of("best", "last"), help=about)


def json_flag(add: Add, about: str = "print one JSON document, whose schema trainkit schema prints") -> None:
    """Add `--json`."""
    add("--json", action="store_true", help=about)


def data_flags(add: Add) -> None:
    """Add the flags of verbs that plan a run without opening its data."""
    about = "length of the training data, if its class does not declare it"
    add("--num-samples", metavar="N", type=whole(1, 10**15), help=about)
    add("--open-data", action="store_true", help="read the data, if its class does not declare its samples")


def module_of(verb: str) -> Any:
    """Return the module of a verb, imported now."""
    return import_module(f"trainkit.verbs.{VERBS[verb].folder}.{verb}")


def parser_of(verb: str | None) -> tuple[ArgumentParser, dict[str, Action]]:
    """Return the parser of a verb, or of a line that names none, and its flags by name."""
    found = VERBS.get(verb or "")
    about = "One config, the same training anywhere. Without a verb it trains; without arguments, on the digits."
    parser = ArgumentParser(
        prog="trainkit",
        usage=f"trainkit {verb} {found.usage}" if found else "trainkit [VERB] [ARGUMENTS] [--flags] OVERRIDES",
        description=f"{found.about}\n\nexample: trainkit {verb} {found.example}" if found else about,
        epilog=None if found else _EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
        argument_default=SUPPRESS,
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
    )
    known = dict[str, Action]()
    group = parser.add_argument_group("flags")

    def add(*names: str, **settings: Any) -> None:
        action = group.add_argument(*names, **settings)
        known[names[-1].removeprefix("--")] = action

    parser.register("action", None, _Once)
    if verb is not None and hasattr(module_of(verb), "add_flags"):
        module_of(verb).add_flags(add)
        group = parser.add_argument_group("flags of every verb")
    add("-h", "--help", action="store_true", help="show this, or the help of the verb")
    add("-V", "--version", action="store_true", help="show the version")
    add("-m", "--multirun", action="store_true", help="train: run every combination of comma lists, a=1,2 b=x,y")
    about = "a folder of your own YAML files, GROUP/CHOICE.yaml; it is searched first"
    add("-cd", "--config-dir", metavar="DIR", action="append", help=about)
    about = "trust this package: _target_ may name its classes and functions"
    add("--allow-package", metavar="PKG", action="append", help=about)
    about = "print the composed config and stop: job, hydra or all"
    add("-c", "--cfg", metavar="WHICH", type=one_of("job", "hydra", "all"), help=about)
    about = 'install completion: eval "$(trainkit -sc install=bash)"'
    add("-sc", "--shell-completion", metavar="install=SHELL", help=about)
    for names, instead in _REFUSED.items():
        parser.add_argument(*names, action=_Refused, nargs="?", const=instead, help=SUPPRESS)
    return parser, known


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
    parser, known = parser_of(verb)
    words, problems = list(words), list[Problem]()
    while True:
        try:
            found, others = parser.parse_known_args(words)
        except ArgumentError as error:  # argparse stops at the first one: take it out, and go on
            problems.append(_taken_out(words, error, known))
        else:
            break
    for word in [one for one in others if one.startswith("-") and len(one) > 1]:
        near = closest(word.lstrip("-").partition("=")[0], known)
        rule = "no such flag." + (f" Did you mean --{near}?" if near else " trainkit --help shows them.")
        problems.append(Problem(key=word, rule=rule, origin=COMMAND_LINE))
        others.remove(word)
    return {name.replace("_", "-"): value for name, value in vars(found).items()}, others, problems


def _taken_out(words: list[str], error: ArgumentError, known: Mapping[str, Action]) -> Problem:
    """Remove the flag that argparse refuses, with its value; return its problem."""
    names = str(error.argument_name).split("/")
    place = next(place for place, word in enumerate(words) if word.partition("=")[0] in names)
    word, has_value, value = words.pop(place).partition("=")
    flag = names[-1].removeprefix("--")
    action = known.get(flag)
    if action is not None and action.nargs == 0:
        rule = f"--{flag} takes no value."
    else:
        if action is not None and not has_value and place < len(words):
            value = words.pop(place)
        rule = error.message if value or action is None else f"needs a value: --{flag} {action.metavar}."
    return Problem(key=word, value=value or MISSING, rule=rule, origin=COMMAND_LINE)


def verb_of(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the verb, None without one, and all other words.

    Flags may stand before the verb: it is the first verb with nothing but its flags, their values and overrides
    before it.
    """
    for place, word in enumerate(words):
        if word in VERBS:
            _, others, problems = parsed(word, words[:place])
            if all(map(is_override, others)) and not any(one.value is MISSING for one in problems):
                return word, [*words[:place], *words[place + 1 :]]
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
    found, others, problems = parsed(verb, rest[:end])
    bare, overrides = list[str](), list[str]()
    for word in others:
        if is_override(word) and not (verb and len(bare) < VERBS[verb].paths and os.path.lexists(word)):
            overrides.append(word)
        else:
            literal = str(Path(word)).startswith("~") and os.path.lexists(word)  # no user's home
            bare.append(str(Path(word).absolute()) if literal else word)
    bare += rest[end + 1 :]
    folders = found.get("config-dir", ())
    broken = [(path, rule) for path in (*bare, *folders) if (rule := path_rule(path))]
    problems += [Problem(key=path, rule=rule, origin=COMMAND_LINE) for path, rule in broken]
    if verb is None and bare and not problems:
        rule = f"no such verb. {nearest(bare[0], VERBS)}"
        problems.append(Problem(key=bare[0], rule=rule, origin=COMMAND_LINE))
    if "multirun" in found and verb not in (None, "train"):
        rule = f"belongs to train. {verb} compares the choices of a comma list without it."
        problems.append(Problem(key="-m", rule=rule, origin=COMMAND_LINE))
    if problems:
        raise ConfigError(problems)
    call = Call(
        verb=verb or "train",
        arguments=tuple(bare),
        flags={name: value for name, value in found.items() if name not in _OF_TRAINKIT},
        overrides=tuple(overrides),
        config_dirs=tuple(Path(folder).expanduser().absolute() for folder in folders),
        packages=tuple(name for text in found.get("allow-package", ()) for name in text.split(",")),
        multirun="multirun" in found,
    )
    return call, {name: value for name, value in found.items() if name in _OF_TRAINKIT}


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
        from trainkit.config.check import checked  # noqa: PLC0415 - a verb that composes nothing needs neither
        from trainkit.config.check.unset import checked_without  # noqa: PLC0415
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

    def problem(self, flag: str, rule: str) -> Problem:
        """Return a problem of a flag of this call, which may be missing.

        Example:
            >>> str(Call(flags={"k": "0"}).problem("k", "must be 1 or more."))
            '--k=0: must be 1 or more. (command line)'
        """
        value = self.flags.get(flag, True)
        return Problem(key=f"--{flag}", value=MISSING if value is True else value, rule=rule, origin=COMMAND_LINE)

    def check_arity(self, *, arguments: int = 0, overrides: bool = True) -> None:
        """Refuse arguments that this verb does not take.

        Raises:
            ConfigError: too many or too few arguments, or overrides for a verb that takes none.
        """
        if len(self.arguments) != arguments:
            given = ", ".join(self.arguments) or "none"
            rule = f"takes {arguments} argument{'' if arguments == 1 else 's'}, and got {given}."
            hint = " Set a key by key=value." if self.arguments else f" See trainkit {self.verb} --help."
            if overrides and self.overrides and len(self.arguments) < arguments:
                hint += " A path with = in it begins with / or ./."
            raise ConfigError([Problem(key=self.verb, rule=rule + hint, origin="command line")])
        if self.overrides and not overrides:
            raise refusal(self.verb, "takes no key=value.")


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
