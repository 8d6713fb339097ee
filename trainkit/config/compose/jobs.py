"""Run composed configs under Hydra: one job in its folder, or many through a sweeper and its launcher.

Trainkit's composition replaces Hydra's, so that `.hydra/config.yaml`, every launcher and every sweeper see the values
that were checked.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra.core import utils as hydra_utils
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.plugins.config_source import ConfigResult
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from trainkit.config.compose import CONFIG, Composer, hydra_state
from trainkit.config.composition import Composition, dotted
from trainkit.config.grammar import COMMAND_LINE, key_of, replacing, setting
from trainkit.config.interface import trusting
from trainkit.config.secrets import redacted, texts_in
from trainkit.config.targets.allowed import TARGET, root_of
from trainkit.config.targets.build import imported
from trainkit.errors import ConfigError, Problem, refuse

T = TypeVar("T")


def _forced(line: str) -> str:
    """Return an argument for Hydra with the prefix that it needs: without ++, Hydra takes no new key in a mapping of
    names, such as hydra.callbacks, and with +, no choice or key that is there.
    """
    if line.lstrip("+").startswith(("hydra.launcher", "hydra.sweeper")):  # nodes of plugins, which know their keys
        return line
    return f"++{line.lstrip('+')}" if line.lstrip("+").startswith("hydra.") else line.lstrip("+")


class _HydraFiles(CachingConfigRepository):
    """Presents the Hydra settings of a composition as the primary config, in addition to Hydra's own files."""

    def __init__(self, delegate: Any, composition: Composition) -> None:
        result = ConfigResult(
            provider="trainkit",
            path="config.yaml",
            config=OmegaConf.create({"hydra": composition.hydra}),
            header={"package": None},
        )
        choices = [{f"override /{group}": name} for group, name in composition.hydra_choices.items()]
        result.defaults_list = delegate._create_defaults_list(CONFIG, OmegaConf.create(["_self_", *choices]))  # noqa: SLF001
        self.delegate, self.cache = copy.copy(delegate), {f"config_path={CONFIG}": result}


class ComposedConfigLoader(ConfigLoaderImpl):
    """Hydra's config loader, with the values from trainkit's composition."""

    def __init__(
        self, composer: Composer, check: Callable[[Composition], Composition] = lambda it: it, *, lenient: bool = False
    ) -> None:
        super().__init__(composer.loader.config_search_path)
        self.composer = composer
        self._composition = Composition(values={})
        self.hydra_arguments: list[str] = []
        """Hydra arguments of the sweep."""
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
        if len(single) == len(parsed):
            composition = self.check(composition)
        if (problems or composition.problems) and not self.lenient:
            raise ConfigError([*problems, *composition.problems])
        return self.configuration(composition, parsed, run_mode)

    def configuration(self, composition: Composition, parsed: Sequence[Override], run_mode: RunMode) -> DictConfig:
        """Return the config of a job in Hydra's form, with values that are already composed."""
        self._composition = composition
        lines = [_forced(item.input_line or "") for item in parsed if item.is_hydra_override()]
        cfg = super().load_configuration(CONFIG, lines, run_mode, from_shell=False)
        refuse_hydra_targets(cfg.hydra, self.composer.packages)
        task = [item for item in parsed if not item.is_hydra_override()]
        OmegaConf.set_struct(cfg, False)
        for key in [key for key in cfg if key != "hydra"]:
            del cfg[key]
        for name, value in redacted(composition.values).items():
            cfg[name] = value
        with open_dict(cfg.hydra):
            cfg.hydra.overrides.task = [item.input_line or "" for item in task]
            cfg.hydra.overrides.hydra = [item.input_line or "" for item in parsed if item.is_hydra_override()]
            cfg.hydra.runtime.choices.update(composition.choices)
            folder = _sweep_folder(composition.values.get("sweep", {}))
            if folder and not any(item.key_or_group == "hydra.sweep.dir" for item in parsed):
                cfg.hydra.sweep.dir = folder
            naming = cfg.hydra.job.config.override_dirname
            lines = [
                item.input_line or ""
                for item in task
                if not item.is_sweep_override() and item.key_or_group not in naming.exclude_keys
            ]
            # OmegaConf would resolve a reference to a variable, also to that of a secret
            texts = sorted(line for line in lines if "${oc." not in line)
            cfg.hydra.job.override_dirname = naming.item_sep.join(texts).replace("=", naming.kv_sep)
        return cfg

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Return the config of a sweep's job."""
        config = self.load_configuration(CONFIG, [*self.hydra_arguments, *sweep_overrides], RunMode.RUN)
        OmegaConf.copy_cache(from_config=master_config, to_config=config)
        return config

    def command(self, overrides: Sequence[str], folder: Path) -> tuple[str, ...]:
        """Return the command that runs one point of a sweep in a folder, in its own process.

        Keys of a group that this point's choice does not have are left out: they belong to the other choices.
        """
        composition = self.composer.compose(about_one_job(overrides), for_others=True)
        applicable: Sequence[str] = [*composition.overrides, *composition.hydra_overrides]
        # What a project allows is among these: the job does not look for one.
        flags = ["--no-project"]
        flags += [word for path in self.composer.config_dirs for word in ("--config-dir", str(path))]
        flags += [word for name in self.composer.packages for word in ("--allow-package", name)]
        if composition.submits_single_runs:  # the job itself must train, and not be submitted again
            applicable = replacing(applicable, "hydra.mode=RUN")
        return (sys.executable, "-m", "trainkit", *flags, *applicable, setting("hydra.run.dir", folder))

    def _parse_overrides_and_create_caching_repo(
        self, config_name: str | None, overrides: list[str], parsed_overrides: list[Override] | None = None
    ) -> tuple[list[Override], CachingConfigRepository]:
        del config_name, parsed_overrides  # the second is of Hydra 1.4
        return self.composer.parse(overrides)[0], _HydraFiles(self.composer.loader.repository, self._composition)


def _sweep_folder(sweep: Mapping[str, Any]) -> str | None:
    """Return the folder that `sweep.*` names, if any."""
    if sweep.get("resume"):
        return str(Path(sweep["resume"]).expanduser())
    return f"outputs/sweeps/{sweep['name']}" if sweep.get("name") else None


def about_one_job(overrides: Sequence[str]) -> list[str]:
    """Return the arguments that concern a single job: arguments about the sweep have no effect in a job."""
    about_sweep = ("sweep.", "hydra.sweep", "hydra.launcher", "hydra/launcher", "hydra/sweeper", "hydra.mode",
        "hydra.run.dir")  # fmt: skip
    return [line for line in overrides if not line.lstrip("+~").startswith(about_sweep)]


def hydra_config(composition: Composition) -> DictConfig:
    """Return the composition with Hydra's node, as `.hydra/` stores it."""
    composer = Composer(composition.config_dirs, composition.packages)
    parsed, _ = composer.parse([*composition.overrides, *composition.hydra_overrides])
    cfg = ComposedConfigLoader(composer).configuration(composition, parsed, RunMode.RUN)
    cfg.hydra.overrides.task = list(composition.overrides)
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

    An existing `.hydra/` in the folder is kept: it describes the first start of the run, not a resume.

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
        hydra_utils.JobRuntime.instance().set("name", cfg.hydra.job.name)
        callbacks = Callbacks(cfg)
        callbacks.on_run_start(config=cfg, config_name=CONFIG)
        raised: list[BaseException] = []

        def guarded(_: DictConfig) -> T | None:
            try:
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
    node = cfg.hydra.job_logging
    plain = OmegaConf.to_container(node) if node is not None else {}
    if not isinstance(plain, dict):
        return
    handlers, root = plain.get("handlers") or {}, plain.get("root") or {}
    if (handlers.get("file") or {}).get("filename") == _HYDRA_LOG and "file" in root.get("handlers", ()):
        del node.handlers.file
        node.root.handlers = [name for name in root["handlers"] if name != "file"]


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
        check: returns a point proposed by the sweeper in the form that is run; raises if it is invalid.

    Returns:
        The result of the sweeper: for the basic one a list of lists of `JobReturn`.
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
        result = sweeper.sweep(arguments=arguments)
        callbacks.on_multirun_end(config=cfg, config_name=CONFIG)
        return result


def job_command(packages: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Return the command of the current Hydra job, and its folder: for launchers that do not know trainkit."""
    hydra = HydraConfig.get()
    dirs = [source.path for source in hydra.runtime.config_sources if source.provider == "command-line"]
    loader = ComposedConfigLoader(Composer(dirs, packages))
    folder = str(hydra.runtime.output_dir)
    overrides: Any = OmegaConf.to_container(hydra.overrides, resolve=False)  # references stay references
    lines = [*overrides["task"], *about_one_job(overrides["hydra"])]
    return loader.command(lines, Path(folder)), folder


def complete(words: str, *, config_dirs: Sequence[str | Path] = ()) -> list[str]:
    """Return completions of the last word of a line of overrides.

    Example:
        >>> complete("schedule=cos")
        ['schedule=cosine']
    """
    with hydra_state():
        from hydra._internal.core_plugins.bash_completion import BashCompletion  # noqa: PLC0415 - for a shell only

        completion = BashCompletion(ComposedConfigLoader(Composer(config_dirs), lenient=True))
        matches: list[str] = completion._query(config_name=CONFIG, line=words)  # noqa: SLF001
        return matches


def show(composition: Composition, kind: str) -> None:
    """Print the config as YAML: `job`, `hydra` or `all`."""
    with hydra_state():
        shown = redacted(composition.values)
        cfg = hydra_config(composition) if kind != "job" else OmegaConf.create(shown)
        if kind == "hydra":
            cfg = OmegaConf.create({"hydra": cfg.hydra})
        sys.stdout.write(OmegaConf.to_yaml(cfg))


_PLUGINS: Final = ("hydra_plugins", "hydra._internal.core_plugins")
_CALLBACKS: Final = ("hydra_plugins", "hydra.experimental.callbacks")
_NODE_RESOLVERS: Final = ("${oc.decode", "${oc.create", "${oc.dict")
_STREAMS: Final = ("ext://sys.stdout", "ext://sys.stderr")
_LOGGING: Final = (logging.Handler, logging.Formatter, logging.Filter)
_CALLED: Final = ("()", "class", "queue", "listener")
"""Keys whose value `logging.config.dictConfig` imports and calls."""


def refuse_hydra_targets(node: DictConfig, packages: Sequence[str]) -> None:
    """Refuse a Hydra node that names something that neither Hydra nor Python's `logging` defines.

    Hydra and `logging.config` call anything that a text in this node names, so the rule for every `_target_`
    (`trainkit.config.targets.allowed`) is applied to it before either of them reads it.

    Raises:
        ConfigError: every such name.
    """
    values = OmegaConf.to_container(node, resolve=False)
    refuse(
        Problem(key=dotted(("hydra", *path)), value=value, rule=rule)
        for path, value in texts_in(values)
        if (rule := _rule(path, value, packages)) is not None
    )


def _rule(path: tuple[str, ...], text: str, packages: Sequence[str]) -> str | None:
    """Return what is wrong with one text of the node; None if nothing is."""
    is_called = path[-1] == TARGET or (path[0].endswith("_logging") and path[-1] in _CALLED)
    names_code = is_called or text.startswith("ext://")
    if any(resolver in text for resolver in _NODE_RESOLVERS) or (names_code and "${" in text):
        return "must be written out: a reference is resolved only when Hydra calls it."
    if path[0].endswith("_logging") and text.startswith("${") and text.endswith("}"):
        return "must be written out: it may resolve to a handler, which would be called."
    if path[0] == "callbacks" and len(path) < 3 and "${" in text:
        return f"must be a mapping with {TARGET}."
    if text.startswith("ext://") and text not in _STREAMS:
        return _package_rule(text.removeprefix("ext://"), packages)
    return _rule_of_called(path, text, packages) if is_called else None


def _rule_of_called(path: tuple[str, ...], text: str, packages: Sequence[str]) -> str | None:
    """Return what is wrong with a text that names something that will be called; None if nothing is."""
    if path in (("launcher", TARGET), ("sweeper", TARGET)) and text.startswith(_prefixes(_PLUGINS)):
        return None  # Hydra itself refuses anything that is not a plugin of these two kinds
    if path[0] == "callbacks" and len(path) == 3 and text.startswith(_prefixes(_CALLBACKS)):
        return _kind_rule(text, (Callback,), "is not a callback of Hydra.")
    if path[-1] != TARGET and root_of(text) == "logging":
        return _kind_rule(text, _LOGGING, "is not a handler, formatter or filter of Python's logging.")
    return _package_rule(text, packages)


def _prefixes(homes: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{home}." for home in homes)


def _package_rule(text: str, packages: Sequence[str]) -> str | None:
    package = root_of(text)
    if package not in packages:
        return f"{package} is not among the packages that Hydra's node may name. To trust it: {trusting(package)}."
    home = str(getattr(imported(text), "__module__", ""))
    return None if root_of(home) == package else f"is defined in {home}, not in {package}. Name it where it is defined."


def _kind_rule(text: str, kinds: tuple[type, ...], rule: str) -> str | None:
    kind = imported(text)
    return None if isinstance(kind, type) and issubclass(kind, kinds) else rule
