"""Running composed configs under Hydra: one job in its folder, or many through a sweeper and its launcher.

Hydra's own composition is replaced by trainkit's, so that `.hydra/config.yaml`, every launcher and every sweeper see
the values that were checked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.config_repository import CachingConfigRepository
from hydra.core import utils as hydra_utils
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import env_override
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from trainkit.config.compose.composer import Composer
from trainkit.config.compose.files import CONFIG, HydraFiles, hydra_state
from trainkit.config.compose.hydra_targets import refuse_hydra_targets
from trainkit.config.composition import Composition
from trainkit.config.grammar import COMMAND_LINE
from trainkit.config.secrets import hidden_arguments, redacted
from trainkit.errors import ConfigError, Problem
from trainkit.redaction import REDACTED, redacted_argument, remember, secrets_in

__all__ = ["Loader", "complete", "hydra_config", "hydra_problems", "multirun", "run_job"]

T = TypeVar("T")


class Loader(ConfigLoaderImpl):
    """Hydra's config loader, with the values from trainkit's composition."""

    def __init__(
        self, composer: Composer, check: Callable[[Composition], None] | None = None, *, lenient: bool = False
    ) -> None:
        super().__init__(composer.loader.config_search_path)
        self.composer = composer
        self._composition = Composition(values={})
        self.hydra_arguments: list[str] = []
        """Arguments for Hydra of the sweep, with their secrets: the config of a sweep has none."""
        self.check = check
        """Called with every composition that a sweep makes."""
        self.lenient = lenient
        """Whether a composition with problems will do: a line that is still being typed has some."""

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """Hydra's own node by Hydra, everything else by trainkit."""
        del config_name, from_shell, validate_sweep_overrides
        parsed, problems = self.composer.parse(overrides)
        single = [item for item in parsed if not item.is_sweep_override()]
        composition = self.composer.compose([item.input_line or "" for item in single], for_others=True)
        if (problems or composition.problems) and not self.lenient:
            raise ConfigError([*problems, *composition.problems])
        if self.check is not None and len(single) == len(parsed):
            self.check(composition)
        return self.configuration(composition, parsed, run_mode)

    def configuration(self, composition: Composition, parsed: Sequence[Override], run_mode: RunMode) -> DictConfig:
        """The config of a job as Hydra wants it, around values that are composed already."""
        self._composition = composition
        lines = [item.input_line or "" for item in parsed if item.is_hydra_override()]
        cfg = super().load_configuration(CONFIG, lines, run_mode, from_shell=False)
        refuse_hydra_targets(cfg.hydra, self.composer.packages)
        task = [item for item in parsed if not item.is_hydra_override()]
        OmegaConf.set_struct(cfg, False)
        for key in [key for key in cfg if key != "hydra"]:
            del cfg[key]
        for name, value in redacted(composition.values)[0].items():
            cfg[name] = value
        with open_dict(cfg.hydra):
            cfg.hydra.overrides.task = _shown(item.input_line for item in task)
            cfg.hydra.overrides.hydra = _shown(item.input_line for item in parsed if item.is_hydra_override())
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
        """The config of a job of a sweep, without secrets."""
        config = self.load_configuration(CONFIG, [*self.hydra_arguments, *sweep_overrides], RunMode.RUN)
        OmegaConf.copy_cache(from_config=master_config, to_config=config)
        redact_hydra(config)
        return config

    def command(self, overrides: Sequence[str], folder: Path) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return the command that runs one point of a sweep in a folder, in a process of its own.

        Keys of a group that this point's choice does not have are left out: they are meant for the other choices.

        Returns:
            The command without secrets, and the variables of its environment that hold them.
        """
        composition = self.composer.compose(_kept(overrides), for_others=True)
        applicable = [*composition.overrides, *composition.hydra_overrides]
        flags = [word for path in self.composer.config_dirs for word in ("--config-dir", str(path))]
        flags += [word for name in self.composer.packages for word in ("--allow-package", name)]
        if composition.hands_on:  # the job itself is to train, not to be handed on once more
            applicable.append("hydra.mode=RUN")
        escaped = str(folder).replace("\\", "\\\\").replace('"', '\\"')
        shown, secrets = hidden_arguments([*flags, *applicable, f'hydra.run.dir="{escaped}"'])
        return (sys.executable, "-m", "trainkit", *shown), secrets

    def _parse_overrides_and_create_caching_repo(
        self, config_name: str | None, overrides: list[str]
    ) -> tuple[list[Override], CachingConfigRepository]:
        del config_name
        return self.composer.parse(overrides)[0], HydraFiles(self.composer.loader.repository, self._composition)


def redact_hydra(cfg: DictConfig) -> dict[tuple[str, ...], Any]:
    """Take the secrets out of Hydra's own node, `hydra.job.env_set` or `hydra.launcher`; return them by their path."""
    values: Any = OmegaConf.to_container(cfg.hydra, resolve=False, throw_on_missing=False)
    found = dict(secrets_in(values))
    with open_dict(cfg):
        for path, value in found.items():
            remember(value)
            OmegaConf.update(cfg.hydra, ".".join(path), REDACTED, merge=False, force_add=True)
    return found


def _shown(lines: Iterable[str | None]) -> list[str]:
    return [redacted_argument(line or "") for line in lines]


def _sweep_folder(sweep: Mapping[str, Any]) -> str | None:
    """The folder that `sweep.*` names, if it names one."""
    if sweep.get("resume"):
        return str(Path(sweep["resume"]).expanduser())
    return f"outputs/sweeps/{sweep['name']}" if sweep.get("name") else None


def hydra_config(composition: Composition) -> DictConfig:
    """The composition with Hydra's node, as `.hydra/` keeps it."""
    composer = Composer(composition.config_dirs, composition.packages)
    parsed, _ = composer.parse([*composition.overrides, *composition.hydra_overrides])
    cfg = Loader(composer).configuration(composition, parsed, RunMode.RUN)
    cfg.hydra.overrides.task = _shown(composition.overrides)
    return cfg


def hydra_problems(composition: Composition) -> list[Problem]:
    """What Hydra says about the arguments meant for it; asked only where there are some."""
    try:
        with hydra_state():
            hydra_config(composition)
    except (HydraException, OmegaConfBaseException) as error:
        told = [str(error), str(error.__cause__ or "")]
        lines = [line.strip() for line in str(error.__cause__ or error).splitlines()]
        rule = f"Hydra does not take it: {next((line for line in lines if line and line[-1] != ':'), '')}"
        arguments = composition.hydra_overrides
        if not arguments:
            return [Problem(key="hydra", rule=rule)]
        culprit = next((item for item in arguments if any(_key(item) in text for text in told)), arguments[0])
        key, _, value = culprit.lstrip("+").partition("=")
        return [Problem(key=key, value=value, rule=rule, origin=COMMAND_LINE)]
    return []


def _key(argument: str) -> str:
    return argument.lstrip("+~").partition("=")[0]


def run_job(composition: Composition, folder: Path, task: Callable[[], T], *, configure_logging: bool = True) -> T:
    """Run a task as a Hydra job in a folder that exists: `.hydra/`, logging, callbacks, environment.

    A folder that has a `.hydra/` keeps it: it tells how the run began, and a resumed run begins no second time.

    Args:
        composition: a checked composition.
        folder: the run folder.
        task: what to run; it is called in this process.
        configure_logging: whether Hydra sets up the loggers of this process, with `train.log` in the folder.

    Returns:
        What the task returns. What it raises is raised unchanged.
    """
    with hydra_state():
        cfg = hydra_config(composition)
        with open_dict(cfg):
            cfg.hydra.run.dir = str(folder)
            cfg.hydra.mode = RunMode.RUN
            if (folder / ".hydra").exists():
                cfg.hydra.output_subdir = None
        hidden = redact_hydra(cfg)
        variables = {path[-1]: str(value) for path, value in hidden.items() if path[:2] == ("job", "env_set")}
        hydra_utils.JobRuntime.instance().set("name", cfg.hydra.job.name)
        callbacks = Callbacks(cfg)
        callbacks.on_run_start(config=cfg, config_name=CONFIG)
        raised: list[BaseException] = []

        def guarded(_: DictConfig) -> T | None:
            try:
                with env_override(variables):  # Hydra has set those without secrets
                    return task()
            except Exception as error:
                raised.append(error)
                raise

        done = hydra_utils.run_job(
            hydra_context=HydraContext(config_loader=Loader(Composer(composition.config_dirs)), callbacks=callbacks),
            task_function=guarded,
            config=cfg,
            job_dir_key="hydra.run.dir",
            job_subdir_key=None,
            configure_logging=configure_logging,
        )
        callbacks.on_run_end(config=cfg, config_name=CONFIG, job_return=done)
    if raised:
        raise raised[0]
    result: T = done.return_value
    return result


def multirun(
    overrides: Sequence[str],
    *,
    config_dirs: Sequence[str | Path],
    packages: Sequence[str],
    task: Callable[[DictConfig], Any],
    check: Callable[[Composition], None],
) -> Any:
    """Hand a sweep to Hydra's sweeper, and its jobs to the launcher that the cluster chose.

    Args:
        overrides: arguments, Hydra's own among them.
        config_dirs: the user's own folders of configuration.
        packages: packages that targets may come from besides.
        task: a module-level function that runs one job; launchers may pickle it.
        check: raises where a point that a sweeper thought of is no good.

    Returns:
        What the sweeper returns: for the basic one a list of lists of `JobReturn`.
    """
    with hydra_state():
        loader = Loader(Composer(config_dirs, packages), check)
        parsed = loader.composer.parse(overrides)[0]
        arguments = [item.input_line or "" for item in parsed if not item.is_hydra_override()]
        loader.hydra_arguments = [item.input_line or "" for item in parsed if item.is_hydra_override()]
        cfg = loader.load_configuration(CONFIG, list(overrides), RunMode.MULTIRUN)
        with open_dict(cfg):
            cfg.hydra.mode = RunMode.MULTIRUN
        hydra_utils.JobRuntime.instance().set("name", cfg.hydra.job.name)
        callbacks = Callbacks(cfg)
        callbacks.on_multirun_start(config=cfg, config_name=CONFIG)
        context = HydraContext(config_loader=loader, callbacks=callbacks)
        sweeper = Plugins.instance().instantiate_sweeper(config=cfg, hydra_context=context, task_function=task)
        redact_hydra(cfg)
        _given.update({redacted_argument(line): line for line in overrides if redacted_argument(line) != line})
        try:
            result = sweeper.sweep(arguments=arguments)
        finally:
            _given.clear()
        callbacks.on_multirun_end(config=cfg, config_name=CONFIG)
        return result


def job_command(packages: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str], str]:
    """The command of the job that Hydra is in, its secrets, and its folder: for launchers that know of no trainkit."""
    hydra = HydraConfig.get()
    dirs = [source.path for source in hydra.runtime.config_sources if source.provider == "command-line"]
    loader = Loader(Composer(dirs, packages))
    folder = str(hydra.runtime.output_dir)
    lines = [_given.get(line, line) for line in (*hydra.overrides.task, *_kept(hydra.overrides.hydra))]
    return (*loader.command(lines, Path(folder)), folder)


_given: dict[str, str] = {}
"""Arguments without their secrets -> as they were given; of the sweep that this process runs."""


def _kept(overrides: Sequence[str]) -> list[str]:
    """Hydra's arguments that concern a single job; those about the sweep have no effect in it."""
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


def complete(words: str, *, config_dirs: Sequence[str | Path] = ()) -> list[str]:
    """Completions of the last word of a line of overrides.

    Example:
        >>> complete("schedule=cos")
        ['schedule=cosine']
    """
    from hydra._internal.core_plugins.bash_completion import BashCompletion  # noqa: PLC0415 - for a shell only

    with hydra_state():
        plugin = BashCompletion(Loader(Composer(config_dirs), lenient=True))
        found: list[str] = plugin._query(config_name=CONFIG, line=words)  # noqa: SLF001
        return found


def show(composition: Composition, kind: str) -> None:
    """Print the config as YAML: `job`, `hydra` or `all`."""
    with hydra_state():
        shown = redacted(composition.values)[0]
        cfg = hydra_config(composition) if kind != "job" else OmegaConf.create(shown)
        if kind != "job":
            redact_hydra(cfg)
        if kind == "hydra":
            cfg = OmegaConf.create({"hydra": cfg.hydra})
        sys.stdout.write(OmegaConf.to_yaml(cfg))
