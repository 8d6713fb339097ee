"""What composing gives: the values of a run, where each came from, and what the user should know about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from trainkit.config.provenance import NOWHERE, KeyPath, Level, Origin, dotted
from trainkit.config.schema import RunConfig
from trainkit.config.secrets.keys import secret_keys
from trainkit.config.secrets.secrets import redacted
from trainkit.config.yaml_documents import Document
from trainkit.errors import MISSING, ConfigError, Problem
from trainkit.redaction import REDACTED

__all__ = ["Composition", "ConfigFile", "path_of"]

_SWEEPER: Final = "hydra/sweeper="
_LAUNCHER: Final = "hydra/launcher="


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """A file that took part in a composition."""

    group: str
    """The group, `model`; empty for config.yaml."""
    name: str
    """The choice, `mlp`."""
    package: KeyPath
    """Where its content stands in the config."""
    level: Level
    document: Document
    shipped: bool
    """Whether it is trainkit's own file."""


@dataclass(frozen=True, kw_only=True)
class Composition:
    """A config before anything is built from it.

    `problems` are those that composing itself met; `trainkit.config.check` finds the others.
    """

    values: dict[str, Any]
    """Plain values of a `RunConfig`, interpolations resolved."""
    origins: Mapping[KeyPath, Origin] = field(default_factory=dict)
    """Where each key was set."""
    choices: Mapping[str, str | list[str] | None] = field(default_factory=dict)
    """Group -> choice; a list for callbacks and logger."""
    files: tuple[ConfigFile, ...] = ()
    """The files it was composed of, in ascending precedence."""
    overrides: tuple[str, ...] = ()
    """The arguments it was composed of, without Hydra's own."""
    hydra_overrides: tuple[str, ...] = ()
    """Those for Hydra."""
    hydra: Mapping[str, Any] = field(default_factory=dict)
    """What the files set below `hydra`."""
    hydra_choices: Mapping[str, str] = field(default_factory=dict)
    """Hydra's own groups that the files choose for, `hydra/launcher`."""
    config_dirs: tuple[Path, ...] = ()
    """The user's own folders of configuration."""
    packages: tuple[str, ...] = ()
    """Packages the user allows as targets."""
    notes: tuple[str, ...] = ()
    """What the summary should say: values displaced or dropped, files shadowed."""
    problems: tuple[Problem, ...] = ()
    """What was wrong already while composing."""
    run_dir: Path | None = None
    """`hydra.run.dir` with its date filled in."""
    run_dir_given: bool = False
    """Whether the user named `run_dir`: then it is this folder and no other."""

    def with_notes(self, notes: Iterable[str]) -> Composition:
        """The same with further notes."""
        return replace(self, notes=(*self.notes, *notes))

    def with_origins(self, error: ConfigError) -> ConfigError:
        """An error met later, with the place that set each key where it names none."""
        problems = [
            item if item.origin else replace(item, origin=self.origin(item.key).where) for item in error.problems
        ]
        return ConfigError(self.without_secrets(problems))

    def without_secrets(self, problems: Iterable[Problem]) -> list[Problem]:
        """Return problems whose values are no secrets, also where it is the class that marks the key as one."""
        redacted(self.values)  # from here on no message shows what an imported class marks
        secrets = secret_keys(self.values)

        def hidden(item: Problem) -> bool:
            path = path_of(item.key)
            return item.value is not MISSING and any(path[:length] in secrets for length in range(1, len(path) + 1))

        return [replace(item, value=REDACTED) if hidden(item) else item for item in problems]

    @property
    def cfg(self) -> RunConfig:
        """The run as a typed value.

        Raises:
            ConfigError: composing met problems, or values do not fit the schema.
        """
        if self.problems:
            raise ConfigError(self.problems)
        return RunConfig.from_dict(self.values)

    @property
    def sweeper(self) -> str:
        """The choice of hydra/sweeper: what the points of a sweep are."""
        given = [line.partition("=")[2] for line in self.hydra_overrides if line.lstrip("+").startswith(_SWEEPER)]
        return given[-1] if given else self.hydra_choices.get(_SWEEPER[:-1], "basic")

    @property
    def launcher(self) -> str:
        """The choice of hydra/launcher: what starts the jobs of a sweep."""
        given = [line.partition("=")[2] for line in self.hydra_overrides if line.lstrip("+").startswith(_LAUNCHER)]
        return given[-1] if given else self.hydra_choices.get(_LAUNCHER[:-1], "slots")

    @property
    def asks_for_folds(self) -> bool:
        """Whether it is cross-validation as a whole, a run for each fold."""
        cv = self.values.get("cv") or {}
        return cv.get("folds") is not None and cv.get("fold") is None

    @property
    def hands_on(self) -> bool:
        """Whether its cluster has a launcher, which is handed also a single run; the job itself says hydra.mode=RUN."""
        modes = [line.partition("=")[2] for line in self.hydra_overrides if line.lstrip("+").startswith("hydra.mode=")]
        if modes:
            return modes[-1] == "MULTIRUN"
        return self.hydra_choices.get("hydra/launcher", "slots") not in ("slots", "basic")

    @property
    def is_sweep(self) -> bool:
        """Whether it is run as a sweep also without -m."""
        return self.asks_for_folds or self.hands_on

    def origin(self, key: str | KeyPath) -> Origin:
        """Where a key was set, or the nearest key above it."""
        path = path_of(key)
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return NOWHERE

    def problem(self, key: str | KeyPath, rule: str, *, value: Any = None, show_value: bool = True) -> Problem:
        """A problem of a key with the place that set it."""
        where = self.origin(key).where
        name = key if isinstance(key, str) else dotted(key)
        return (
            Problem(key=name, value=value, rule=rule, origin=where)
            if show_value
            else Problem(key=name, rule=rule, origin=where)
        )


def path_of(key: str | KeyPath) -> KeyPath:
    """A key as a path.

    Example:
        >>> path_of("batch.micro_size")
        ('batch', 'micro_size')
    """
    return tuple(key.split(".")) if isinstance(key, str) else key
