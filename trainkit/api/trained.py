"""Find a trained model and compose the config of a job on it: its own values, with changes from the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from trainkit.bounded import MAX_BYTES, expect_map, parse_yaml
from trainkit.config.check import check_names, check_values
from trainkit.config.compose import compose
from trainkit.config.composition import Composition, Level
from trainkit.config.grammar import COMMAND_LINE, key_of
from trainkit.config.resume import compose_resumed
from trainkit.config.targets.allowed import TARGET
from trainkit.errors import ConfigError, Problem, UnreadableError
from trainkit.files import read_text
from trainkit.run.folder.model_file import find_checkpoint
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.inference.request import Source, Verb
from trainkit.run.planning.workers import refuse_open_workers
from trainkit.trainer.manifest import read_manifest

Which = Literal["best", "last"]

_MODELS: Final = ("config.yaml", "model.yaml")
"""Files that describe an exported model."""
_WEIGHTS: Final = "model.safetensors"
_OWN: Final[Mapping[Verb, str]] = {"evaluate": "eval.batch_size", "predict": "predict"}
"""Keys that only one of the verbs uses."""
_KEYS: Final = ("data", "objective", "strategy", "precision", "loader", "compile", "cv", "supervisor")
"""The groups and sections that have an effect on a job."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A trained model that the user named."""

    folder: Path
    """Folder for evaluations: the run, or the folder of an exported model outside of a run."""
    source: Source
    run: Path | None
    """The run whose data and objective the job has by default; None: the command names them."""
    label: str
    """Name of the weights: `last`, `best`, the name of the checkpoint, or the path of the exported model in its run."""
    step: int | None = None
    """Updates of the weights, if they come from a checkpoint."""


def find_trained(path: Path, which: Which) -> Trained:
    """Find what a path names: a run, a checkpoint of one, or a folder or file with a written model.

    Raises:
        ConfigError: there is no model.
        CheckpointError: the run has no such checkpoint, or it is incomplete.
    """
    if not path.exists():
        raise ConfigError([_problem(path, "there is no such file or folder.")])
    if (path / "resolved.yaml").is_file():
        found = find_checkpoint(RunFolder(path), which)
        source = Source(path=str(path), checkpoint=str(found.folder), which=which)
        return Trained(folder=path, source=source, run=path, label=which, step=found.step)
    if (path / "manifest.json").is_file() and (path.absolute().parent.parent / "resolved.yaml").is_file():
        run, step = path.absolute().parent.parent, read_manifest(path).step
        source = Source(path=str(run), checkpoint=str(path), which=which)
        return Trained(folder=run, source=source, run=run, label=path.name, step=step)
    folder = path.parent if path.name == _WEIGHTS and path.is_file() else path
    if not any((folder / name).is_file() for name in _MODELS):
        rule = (
            "holds no model: it is neither a run, nor a checkpoint of one, nor a folder with a "
            f"{_WEIGHTS} and the {' or '.join(_MODELS)} that builds its model."
        )
        raise ConfigError([_problem(path, rule)])
    source = Source(path=str(folder), which=which)
    above = next((one for one in folder.absolute().parents[:3] if (one / "resolved.yaml").is_file()), None)
    if above is None:
        return Trained(folder=folder, source=source, run=_first_member(folder), label=which)
    # An export is replaced as a whole: nothing else is written into its folder.
    label = "_".join([*folder.absolute().relative_to(above).parts, *(["best"] if which == "best" else [])])
    return Trained(folder=above, source=source, run=above, label=label)


def _first_member(folder: Path) -> Path | None:
    """Return the best member of an ensemble, whose data and objective all members share."""
    try:
        described = parse_yaml(read_text(folder / "model.yaml", limit=MAX_BYTES))
        members = expect_map(described, {"made_of": list})["made_of"]
    except (UnreadableError, ValueError):
        return None
    first = Path(str(members[0])) if members else None
    return first if first is not None and (first / "resolved.yaml").is_file() else None


def compose_job(
    trained: Trained,
    overrides: Sequence[str],
    *,
    verb: Verb,
    config_dirs: Sequence[Path] = (),
    packages: Sequence[str] = (),
) -> Composition:
    """Compose and check the config of a job: on one device, unless the command names a strategy.

    Raises:
        ConfigError: a key has no effect on the job, or does not fit.
    """
    _refuse_without_effect(trained, overrides, verb)
    if trained.run is None:
        named = any(key_of(line) == "recipe" for line in overrides)
        composition = compose(
            [*([] if named else ["recipe=null"]), *overrides], config_dirs=config_dirs, packages=packages
        )
    else:
        composition = compose_resumed(trained.run, overrides, config_dirs=config_dirs, packages=packages)
    values: dict[str, Any] = {
        **_without_keys_of_other_class(composition, overrides),
        "resume": None,
        "callbacks": {},
        "logger": {},
        "cluster": {},
        "optimizers": {},
        "init_from": None,
    }
    if not any(key_of(line).partition(".")[0] == "strategy" for line in overrides):
        values["strategy"] = {"_target_": "trainkit.strategies.OneDevice", "device": "auto"}
    composition = replace(composition, values=values)
    problems = [one for one in check_names(composition) if not _is_for_this(one, verb)] or check_values(composition)
    if problems:
        raise ConfigError(problems)
    try:
        refuse_open_workers(composition.cfg)
    except ConfigError as error:
        raise composition.with_origins(error) from error
    return composition


def _is_for_this(problem: Problem, verb: Verb) -> bool:
    """Return whether a problem is that a key of this verb has no effect on a training."""
    return _is_own(problem.key, verb) and problem.rule.startswith("has no effect on a training")


def _without_keys_of_other_class(composition: Composition, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values; where the command names a class, without the keys that the run gave to another one."""
    values = dict(composition.values)
    for group in {key_of(line).removesuffix(f".{TARGET}") for line in overrides if key_of(line).endswith(TARGET)}:
        if group in ("data", "objective"):
            values[group] = {
                name: value
                for name, value in values[group].items()
                if composition.origin((group, name)).level is Level.command_line
            }
    return values


def _is_own(key: str, verb: Verb) -> bool:
    own = _OWN[verb]
    return key == own or key.startswith(f"{own}.")


def _refuse_without_effect(trained: Trained, overrides: Sequence[str], verb: Verb) -> None:
    """Refuse keys that have no effect on a job, and a model without data."""
    keys = {line: key_of(line) for line in overrides}
    allowed = (*_KEYS, *(() if trained.run is not None else ("recipe",)))
    problems = [
        Problem(key=key, rule=f"has no effect on {verb}: {_reason(key)}", origin=COMMAND_LINE)
        for key in keys.values()
        if key.partition(".")[0] not in allowed and not _is_own(key, verb)
    ]
    if trained.run is None and not {"data", "recipe"} & {key.partition(".")[0] for key in keys.values()}:
        rule = (
            f"the run of {trained.source.path} is not known. Give its data and objective: data=... objective=..., or "
            "recipe=NAME."
        )
        problems.append(Problem(key="data", rule=rule))
    if problems:
        raise ConfigError(problems)


def _reason(key: str) -> str:
    group = key.partition(".")[0]
    if group == "model":
        return "the model is the trained one."
    if group == "cluster":
        return "it runs on this machine."
    return f"it takes {', '.join(_KEYS)} and their keys."


def _problem(path: Path, rule: str) -> Problem:
    return Problem(key=str(path), rule=rule, origin=COMMAND_LINE)
