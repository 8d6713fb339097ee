"""Hydra's config loader with the values of trainkit's composition.

Trainkit's composition replaces Hydra's, so that `.hydra/config.yaml`, every launcher and every sweeper see the values
that were checked.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hydra.core.override_parser.types import Override
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from trainkit.config.compose.bounds import refuse_endless
from trainkit.config.compose.composer import Composer
from trainkit.config.compose.files import CONFIG, HydraFiles
from trainkit.config.compose.hydra_adapter import (
    CORE_PLUGINS,
    CachingConfigRepository,
    ConfigLoaderImpl,
    get_overrides_dirname,
)
from trainkit.config.composition import Composition, dotted
from trainkit.config.grammar import replacing
from trainkit.config.secrets import hidden_arguments, redacted, texts_in
from trainkit.config.targets.allowed import TARGET, root_of
from trainkit.config.targets.build import imported
from trainkit.errors import ConfigError, Problem
from trainkit.redaction import REDACTED, redacted_argument, remember, secrets_in


class ComposedConfigLoader(ConfigLoaderImpl):
    """Hydra's config loader, with the values from trainkit's composition."""

    def __init__(
        self, composer: Composer, check: Callable[[Composition], Composition] | None = None, *, lenient: bool = False
    ) -> None:
        super().__init__(composer.loader.config_search_path)
        self.composer = composer
        self._composition = Composition(values={})
        self.hydra_arguments: list[str] = []
        """Arguments for Hydra of the sweep, with their secrets, which the config of a sweep does not hold."""
        self.check = check
        """Called with every composition that a sweep makes; returns the one to use."""
        self.lenient = lenient
        """Whether a composition with problems is accepted: completion reads lines that are still being typed."""

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """Let Hydra load its own node, and take all other values from trainkit."""
        del config_name, from_shell, validate_sweep_overrides
        parsed, problems = self.composer.parse(overrides)
        single = [item for item in parsed if not item.is_sweep_override()]
        composition = self.composer.compose([item.input_line or "" for item in single], for_others=True)
        if self.check is not None and len(single) == len(parsed):
            composition = self.check(composition)
        if (problems or composition.problems) and not self.lenient:
            raise ConfigError([*problems, *composition.problems])
        return self.configuration(composition, parsed, run_mode)

    def configuration(self, composition: Composition, parsed: Sequence[Override], run_mode: RunMode) -> DictConfig:
        """Return the config of a job in Hydra's form, with values that are already composed."""
        self._composition = composition
        lines = [item.input_line or "" for item in parsed if item.is_hydra_override()]
        cfg = super().load_configuration(CONFIG, lines, run_mode, from_shell=False)
        refuse_hydra_targets(cfg.hydra, self.composer.packages)
        refuse_endless(cfg)
        task = [item for item in parsed if not item.is_hydra_override()]
        OmegaConf.set_struct(cfg, False)
        for key in [key for key in cfg if key != "hydra"]:
            del cfg[key]
        for name, value in redacted(composition.values)[0].items():
            cfg[name] = value
        with open_dict(cfg.hydra):
            cfg.hydra.overrides.task = redacted_lines(item.input_line for item in task)
            cfg.hydra.overrides.hydra = redacted_lines(item.input_line for item in parsed if item.is_hydra_override())
            cfg.hydra.runtime.choices.update(composition.choices)
            folder = _sweep_folder(composition.values.get("sweep", {}))
            if folder and not any(item.key_or_group == "hydra.sweep.dir" for item in parsed):
                cfg.hydra.sweep.dir = folder
            naming = cfg.hydra.job.config.override_dirname
            single = [item for item in task if not item.is_sweep_override()]
            cfg.hydra.job.override_dirname = get_overrides_dirname(
                overrides=[item for item in single if redacted_argument(item.input_line or "") == item.input_line],
                kv_sep=naming.kv_sep,
                item_sep=naming.item_sep,
                exclude_keys=naming.exclude_keys,
            )
        return cfg

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Return the config of a sweep's job, without secrets."""
        config = self.load_configuration(CONFIG, [*self.hydra_arguments, *sweep_overrides], RunMode.RUN)
        OmegaConf.copy_cache(from_config=master_config, to_config=config)
        redact_hydra(config)
        return config

    def command(self, overrides: Sequence[str], folder: Path) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return the command that runs one point of a sweep in a folder, in its own process.

        Keys of a group that this point's choice does not have are left out: they are meant for the other choices.

        Returns:
            The command without secrets, and the variables of its environment that hold them.
        """
        composition = self.composer.compose(about_one_job(overrides), for_others=True)
        applicable: Sequence[str] = [*composition.overrides, *composition.hydra_overrides]
        flags = [word for path in self.composer.config_dirs for word in ("--config-dir", str(path))]
        flags += [word for name in self.composer.packages for word in ("--allow-package", name)]
        if composition.submits_single_runs:  # the job itself must train, and not be submitted again
            applicable = replacing(applicable, "hydra.mode=RUN")
        escaped = str(folder).replace("\\", "\\\\").replace('"', '\\"')
        shown, secrets = hidden_arguments([*flags, *applicable, f'hydra.run.dir="{escaped}"'])
        return (sys.executable, "-m", "trainkit", *shown), secrets

    def _parse_overrides_and_create_caching_repo(
        self, config_name: str | None, overrides: list[str]
    ) -> tuple[list[Override], CachingConfigRepository]:
        del config_name
        return self.composer.parse(overrides)[0], HydraFiles(self.composer.loader.repository, self._composition)


def redact_hydra(cfg: DictConfig) -> dict[tuple[str, ...], Any]:
    """Redact the secrets in Hydra's own node (`hydra.job.env_set`, `hydra.launcher`); return them by their path."""
    values: Any = OmegaConf.to_container(cfg.hydra, resolve=False, throw_on_missing=False)
    found = dict(secrets_in(values))
    with open_dict(cfg):
        for path, value in found.items():
            remember(value)
            OmegaConf.update(cfg.hydra, ".".join(path), REDACTED, merge=False, force_add=True)
    return found


def redacted_lines(lines: Iterable[str | None]) -> list[str]:
    """Return arguments without the values of their secrets."""
    return [redacted_argument(line or "") for line in lines]


def _sweep_folder(sweep: Mapping[str, Any]) -> str | None:
    """Return the folder that `sweep.*` names, if any."""
    if sweep.get("resume"):
        return str(Path(sweep["resume"]).expanduser())
    return f"outputs/sweeps/{sweep['name']}" if sweep.get("name") else None


def about_one_job(overrides: Sequence[str]) -> list[str]:
    """Return the arguments that concern a single job: arguments about the sweep have no effect in a job."""
    about_sweep = (
        "sweep.",
        "hydra.sweep",
        "hydra.launcher",
        "hydra/launcher",
        "hydra/sweeper",
        "hydra.mode",
        "hydra.run.dir",
    )
    return [line for line in overrides if not line.lstrip("+~").startswith(about_sweep)]


_PLUGINS: Final = ("hydra_plugins", CORE_PLUGINS)
_CALLBACKS: Final = ("hydra_plugins", "hydra.experimental.callbacks")
_MAKES_NODES: Final = ("${oc.decode", "${oc.create", "${oc.dict")
_STREAMS: Final = ("ext://sys.stdout", "ext://sys.stderr")
_LOGGING: Final = (logging.Handler, logging.Formatter, logging.Filter)
_CALLED: Final = ("()", "class", "queue", "listener")
"""Keys whose value `logging.config.dictConfig` imports and calls."""
_OWN: Final = "To trust it: --allow-package {}."


def refuse_hydra_targets(node: DictConfig, packages: Sequence[str]) -> None:
    """Refuse a Hydra node that names something that neither Hydra nor Python's `logging` defines.

    Hydra and `logging.config` call anything that a text in this node names, so the rule for every `_target_`
    (`trainkit.config.targets.allowed`) is applied to it before either of them reads it.

    Raises:
        ConfigError: every such name.
    """
    values = OmegaConf.to_container(node, resolve=False)
    problems = [
        Problem(key=dotted(("hydra", *path)), value=value, rule=rule)
        for path, value in texts_in(values)
        if (rule := _rule(path, value, packages)) is not None
    ]
    if problems:
        raise ConfigError(problems)


def _rule(path: tuple[str, ...], text: str, packages: Sequence[str]) -> str | None:
    """Return what is wrong with one text of the node; None if nothing is."""
    is_called = path[-1] == TARGET or (path[0].endswith("_logging") and path[-1] in _CALLED)
    names_code = is_called or text.startswith("ext://")
    if any(resolver in text for resolver in _MAKES_NODES) or (names_code and "${" in text):
        return "must be written out: what it stands for is only known once it would be called."
    if path[0].endswith("_logging") and text.startswith("${") and text.endswith("}"):
        return "must be written out: it may stand for a handler, which would be called."
    if path[0] == "callbacks" and len(path) < 3 and "${" in text:
        return f"must be a mapping with {TARGET}."
    if text.startswith("ext://") and text not in _STREAMS:
        return _of_package(text.removeprefix("ext://"), packages)
    return _rule_of_called(path, text, packages) if is_called else None


def _rule_of_called(path: tuple[str, ...], text: str, packages: Sequence[str]) -> str | None:
    """Return what is wrong with a text that names something that will be called; None if nothing is."""
    if path in (("launcher", TARGET), ("sweeper", TARGET)) and text.startswith(_below(_PLUGINS)):
        return None  # Hydra itself refuses anything that is not a plugin of these two kinds
    if path[0] == "callbacks" and len(path) == 3 and text.startswith(_below(_CALLBACKS)):
        return _unless(text, (Callback,), "is not a callback of Hydra.")
    if path[-1] != TARGET and root_of(text) == "logging":
        return _unless(text, _LOGGING, "is not a handler, formatter or filter of Python's logging.")
    return _of_package(text, packages)


def _below(homes: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{home}." for home in homes)


def _of_package(text: str, packages: Sequence[str]) -> str | None:
    package = root_of(text)
    if package not in packages:
        return f"{package} is not among the packages that Hydra's node may name. {_OWN.format(package)}"
    home = str(getattr(imported(text), "__module__", ""))
    return None if root_of(home) == package else f"is defined in {home}, not in {package}. Name it where it is defined."


def _unless(text: str, kinds: tuple[type, ...], rule: str) -> str | None:
    found = imported(text)
    return None if isinstance(found, type) and issubclass(found, kinds) else rule
