"""Run composed configs under Hydra: one job in its folder, or many through a sweeper and its launcher."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hydra.core import utils as hydra_utils
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import env_override
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from trainkit.config.compose.composer import Composer
from trainkit.config.compose.files import CONFIG, hydra_state
from trainkit.config.compose.hydra_adapter import Callbacks, completions
from trainkit.config.compose.loader import ComposedConfigLoader, about_one_job, redact_hydra, redacted_lines
from trainkit.config.composition import Composition
from trainkit.config.grammar import COMMAND_LINE, key_of
from trainkit.config.secrets import redacted
from trainkit.errors import Problem
from trainkit.redaction import redacted_argument

T = TypeVar("T")


def hydra_config(composition: Composition) -> DictConfig:
    """Return the composition with Hydra's node, as `.hydra/` stores it."""
    composer = Composer(composition.config_dirs, composition.packages)
    parsed, _ = composer.parse([*composition.overrides, *composition.hydra_overrides])
    cfg = ComposedConfigLoader(composer).configuration(composition, parsed, RunMode.RUN)
    cfg.hydra.overrides.task = redacted_lines(composition.overrides)
    return cfg


def hydra_problems(composition: Composition) -> list[Problem]:
    """Return Hydra's errors about the arguments meant for it; Hydra is only called where there are any."""
    try:
        with hydra_state():
            hydra_config(composition)
    except (HydraException, OmegaConfBaseException) as error:
        texts = [str(error), str(error.__cause__ or "")]
        lines = [line.strip() for line in str(error.__cause__ or error).splitlines()]
        rule = f"Hydra does not take it: {next((line for line in lines if line and line[-1] != ':'), '')}"
        arguments = composition.hydra_overrides
        if not arguments:
            return [Problem(key="hydra", rule=rule)]
        culprit = next((item for item in arguments if any(key_of(item) in text for text in texts)), arguments[0])
        key, _, value = culprit.lstrip("+").partition("=")
        return [Problem(key=key, value=value, rule=rule, origin=COMMAND_LINE)]
    return []


def run_job(composition: Composition, folder: Path, task: Callable[[], T], *, configure_logging: bool = True) -> T:
    """Run a task as a Hydra job in an existing folder: `.hydra/`, logging, callbacks, environment.

    An existing `.hydra/` in the folder is kept: it records how the run began, and resuming does not begin it again.

    Args:
        composition: a checked composition.
        folder: the run folder.
        task: what to run; it is called in this process.
        configure_logging: whether Hydra sets up the loggers of this process. Its log file is left out: `train.log`
        already holds the console output.

    Returns:
        The task's return value. Its exceptions are raised unchanged.
    """
    with hydra_state():
        cfg = hydra_config(composition)
        with open_dict(cfg):
            cfg.hydra.run.dir = str(folder)
            cfg.hydra.mode = RunMode.RUN
            if (folder / ".hydra").exists():
                cfg.hydra.output_subdir = None
            _log_to_the_console_alone(cfg)
        hidden = redact_hydra(cfg)
        variables = {path[-1]: str(value) for path, value in hidden.items() if path[:2] == ("job", "env_set")}
        hydra_utils.JobRuntime.instance().set("name", cfg.hydra.job.name)
        callbacks = Callbacks(cfg)
        callbacks.on_run_start(config=cfg, config_name=CONFIG)
        raised: list[BaseException] = []

        def guarded(_: DictConfig) -> T | None:
            try:
                with env_override(variables):  # Hydra has set these variables with their secrets redacted
                    return task()
            except Exception as error:
                raised.append(error)
                raise

        done = hydra_utils.run_job(
            hydra_context=HydraContext(
                config_loader=ComposedConfigLoader(Composer(composition.config_dirs)), callbacks=callbacks
            ),
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


def _log_to_the_console_alone(cfg: DictConfig) -> None:
    """Remove Hydra's default file handler, whose file would duplicate the lines of `train.log`."""
    logging = cfg.hydra.job_logging
    plain = OmegaConf.to_container(logging) if logging is not None else {}
    if not isinstance(plain, dict):
        return
    handlers, root = plain.get("handlers") or {}, plain.get("root") or {}
    if (handlers.get("file") or {}).get("filename") == _HYDRA_LOG and "file" in root.get("handlers", ()):
        del logging.handlers.file
        logging.root.handlers = [name for name in root["handlers"] if name != "file"]


_HYDRA_LOG = "${hydra.runtime.output_dir}/${hydra.job.name}.log"


def multirun(
    overrides: Sequence[str],
    *,
    config_dirs: Sequence[str | Path],
    packages: Sequence[str],
    task: Callable[[DictConfig], Any],
    check: Callable[[Composition], Composition],
) -> Any:
    """Run a sweep with Hydra's sweeper, and its jobs with the launcher that the cluster chose.

    Args:
        overrides: arguments, including Hydra's own.
        config_dirs: the user's config folders.
        packages: further packages that targets may come from.
        task: a module-level function that runs one job; launchers may pickle it.
        check: returns a point that the sweeper proposes as it is run; raises if it is invalid.

    Returns:
        What the sweeper returns: for the basic one a list of lists of `JobReturn`.
    """
    with hydra_state():
        loader = ComposedConfigLoader(Composer(config_dirs, packages), check)
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
    """Return the command of the current Hydra job, its secrets, and its folder: for launchers that do not know
    trainkit.
    """
    hydra = HydraConfig.get()
    dirs = [source.path for source in hydra.runtime.config_sources if source.provider == "command-line"]
    loader = ComposedConfigLoader(Composer(dirs, packages))
    folder = str(hydra.runtime.output_dir)
    lines = [_given.get(line, line) for line in (*hydra.overrides.task, *about_one_job(hydra.overrides.hydra))]
    return (*loader.command(lines, Path(folder)), folder)


_given: dict[str, str] = {}
"""Arguments without their secrets -> the original arguments, for the sweep that this process runs."""


def complete(words: str, *, config_dirs: Sequence[str | Path] = ()) -> list[str]:
    """Return completions of the last word of a line of overrides.

    Example:
        >>> complete("schedule=cos")
        ['schedule=cosine']
    """
    with hydra_state():
        return completions(ComposedConfigLoader(Composer(config_dirs), lenient=True), config_name=CONFIG, line=words)


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
