"""Define the parsed command line of a verb, and its flags."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, cast

from trainkit.config.grammar import refusal
from trainkit.config.values import whole_number
from trainkit.errors import MISSING, ConfigError, Problem

if TYPE_CHECKING:
    from trainkit.config.composition import Composition
    from trainkit.config.schema import RunConfig
    from trainkit.data.splits import DeclaredData

VERBS: Final[Mapping[str, str]] = {
    "train": "train; the default without a verb. -m runs every combination of comma lists",
    "plan": "print the whole run without starting it: tasks, batch, rates, memory",
    "prove": "compare strategies step by step with one device: prove strategy=mirrored",
    "bench": "measure the same training with several choices, in turns: bench strategy=one_device,mirrored",
    "find": "find a learning rate or a shard size by measurements: find lr; find micro_size",
    "resume": "continue a run: resume RUN [strategy=... and other placement]",
    "explain": "print a key's value, its origin, and the effect of a change: explain KEY",
    "diff": "print the differences of two runs that can matter: diff RUN RUN",
    "report": "write the page of one run, of several runs, or of a sweep: report RUN",
    "top": "list the best runs of a sweep or folder: top DIR --k 3; --then strategy=mirrored trains the best again",
    "ensemble": "combine the best runs into one model, and score it with its members: ensemble DIR --k 3",
    "evaluate": "score a trained model on a split, each sample once: evaluate RUN --split val",
    "predict": "write the model's outputs for every sample, in order: predict RUN --out FILE.parquet",
    "export": "write the trained model into files that need no trainkit: export RUN",
    "generate": "continue a text with a trained language model: generate RUN --prompt TEXT",
    "quantize": "write the trained model in 8 or 4 bits, and compare it: quantize RUN --to int8_static",
    "scale": "predict the speedup of more replicas: scale strategy=mirrored --to-replicas 64",
    "advise": "find the best valid way to train on some devices, by plans: advise --devices 8 --hardware h100_sxm",
    "emit": "print the script or manifest that starts a run on an engine: emit slurm --hosts 2 --gpus-per-host 4",
    "init": "write a package of your own that can train at once: init NAME",
    "schema": "print the JSON schema of your YAML files, for editors, or of a JSON output: schema config",
    "watch": "show all runs below a folder, live: watch [DIR]",
    "ls": "list groups, choices and recipes: ls [GROUP [CHOICE]]; the runs of a folder: ls RUNS",
}
"""Verb -> its description, in the order of the help."""
MODULES: Final[Mapping[str, str]] = {
    verb: f"trainkit.verbs.{room}.{verb}"
    for room, verbs in {
        "running": ("train", "resume", "prove"),
        "looking": ("plan", "explain", "diff", "schema", "report", "top", "ls", "watch"),
        "using": ("ensemble", "evaluate", "export", "generate", "predict", "quantize"),
        "starting": ("emit", "init"),
        "measuring": ("advise", "bench", "find", "scale"),
    }.items()
    for verb in verbs
}
"""Verb -> its module, imported when the verb is called."""

PATHS: Final[Mapping[str, float]] = {
    **dict.fromkeys(("resume", "evaluate", "predict", "generate", "export", "quantize", "ensemble", "top", "watch"), 1),
    "ls": 1,
    "diff": 2,
    "report": math.inf,
}
"""Verb -> number of paths that it takes. A word with `=` is a path where one is missing and it exists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """An option of one verb, `--name` or `--name VALUE`."""

    help: str
    """Description in one line."""
    value: str | None = None
    """Name of its value in the help; None for a flag without a value."""
    least: int | None = None
    """Smallest value of a whole number; None: the value is not one."""
    most: int = 10**9
    """Largest value of a whole number."""


CHECKPOINT_FLAG: Final = Flag(help="the checkpoint of a run: last, or best; last without it", value="WHICH")
JSON_FLAG: Final = Flag(help="print one JSON document, whose schema trainkit schema prints")
"""The flag `--json`, for the verbs that have it."""
DATA_FLAGS: Final[Mapping[str, Flag]] = {
    "num-samples": Flag(
        help="length of the training data, if its class does not declare it", value="N", least=1, most=10**15
    ),
    "open-data": Flag(help="read the data, if its class does not declare its samples"),
}
"""The flags of verbs that plan a run without opening its data."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """The parsed command line."""

    verb: str = "train"
    arguments: tuple[str, ...] = ()
    """Plain words after the verb."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """The verb's own flags, by name without dashes; an empty text for a flag without a value."""
    overrides: tuple[str, ...] = ()
    """`key=value` and similar arguments."""
    config_dirs: tuple[Path, ...] = ()
    packages: tuple[str, ...] = ()
    multirun: bool = False

    @property
    def command(self) -> str:
        """Return this call as a command that a user can paste."""
        words = [Path(word).expanduser() if self.verb in PATHS else word for word in self.arguments]
        flags = [part for name, text in self.flags.items() for part in (f"--{name}", text) if part]
        return self.printed(self.verb, [*words, *self.overrides, *flags])

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

    def checkpoint(self) -> Literal["best", "last"]:
        """Return the checkpoint that `--checkpoint` names; the last one without it.

        Raises:
            ConfigError: the value is neither best nor last.

        Example:
            >>> Call().checkpoint(), Call(flags={"checkpoint": "best"}).checkpoint()
            ('last', 'best')
        """
        word = self.flags.get("checkpoint", "last")
        if word not in ("best", "last"):
            raise ConfigError([self.problem("checkpoint", "must be best or last.")])
        return cast("Literal['best', 'last']", word)

    def number(self, name: str) -> int | None:
        """Return the whole number of a flag, which `number_problems` has accepted; None without it."""
        return int(self.flags[name]) if name in self.flags else None

    def problem(self, flag: str, rule: str) -> Problem:
        """Return a problem of a flag of this call, which may be missing.

        Example:
            >>> str(Call(flags={"k": "0"}).problem("k", "must be 1 or more."))
            '--k=0: must be 1 or more. (command line)'
        """
        return Problem(key=f"--{flag}", value=self.flags.get(flag) or MISSING, rule=rule, origin="command line")

    def number_problems(self, flags: Mapping[str, Flag]) -> Iterator[Problem]:
        """Yield the problems of the flags that are whole numbers.

        Example:
            >>> flags = {"k": Flag(help="number of runs", value="N", least=1)}
            >>> [str(problem) for problem in Call(flags={"k": "0"}).number_problems(flags)]
            ['--k=0: must be a whole number, 1 to 1,000,000,000. (command line)']
        """
        for name, flag in flags.items():
            text = self.flags.get(name)
            if text is None or flag.least is None or whole_number(text, low=flag.least, high=flag.most) is not None:
                continue
            yield self.problem(name, f"must be a whole number, {flag.least:,} to {flag.most:,}.")

    def check_numbers(self, flags: Mapping[str, Flag]) -> None:
        """Refuse flags that are not the whole numbers that they must be.

        Raises:
            ConfigError: all problems.
        """
        if problems := list(self.number_problems(flags)):
            raise ConfigError(problems)

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
    return declared_data(cfg.data, cfg.cv, num_samples=call.number("num-samples"), unknown_length=long, ends=ends)
