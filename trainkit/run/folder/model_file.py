"""Load a trained model from its run folder, or write and load it as a separate folder: a safetensors file and
a config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Literal

import torch
import yaml
from torch import nn

from trainkit.config.door import trusting
from trainkit.config.identity import run_config
from trainkit.config.schema import RunConfig
from trainkit.config.targets.allowed import allow_packages, allowed_packages, name_problem, root_of, targets_in
from trainkit.config.targets.build import build
from trainkit.errors import CheckpointError, ConfigError, Problem, UnreadableError
from trainkit.exporting.folder import BEST, CONFIG
from trainkit.exporting.whole_file import WEIGHTS
from trainkit.files import MAX_YAML_BYTES, expect_map, parse_yaml, read_text, write_atomically
from trainkit.numerics.precision import Precision, converted_floats
from trainkit.quantizing.description import QUANTIZED, restored_model
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.planning.build import model_with
from trainkit.trainer.checkpoint.saving import untied
from trainkit.trainer.checkpoint.tensors import Loaded, TensorFile, load, load_below, newest_valid, write_tensors
from trainkit.trainer.manifest import MANIFEST, Checkpoint, FileRecord, is_checkpoint, manifest_below

Which = Literal["best", "last"]
"""Name of a checkpoint of a run."""

_CONFIG: Final = "model.yaml"


def load_model(path: Path, *, checkpoint: Which = "last", packages: Sequence[str] = ()) -> nn.Module:
    """Return a trained model on the CPU, ready to predict.

    Args:
        path: a run folder, a checkpoint of a run, the folder `model` of a run or its file, or a folder that `trainkit
            ensemble` or `trainkit quantize` wrote.
        checkpoint: the checkpoint of a run folder, or the weights of the folder `model`, to load.
        packages: your own packages that the model's classes may come from.

    Returns:
        The model in evaluation mode, in the dtype that its optimizer updated.

    Raises:
        ConfigError: there is no model, or its class is of a package that is not allowed.
        CheckpointError: the weights are damaged, or those of another model.
    """
    refuse_unknown_checkpoint(checkpoint)
    folder = path.parent if path.name == WEIGHTS else path
    with allow_packages(packages):
        if (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file():
            best = folder / BEST
            return _load_written((best if checkpoint == "best" and best.is_dir() else folder) / CONFIG)
        if (folder / _CONFIG).is_file():
            return _load_written(folder / _CONFIG)
        if (folder / "resolved.yaml").is_file():
            return load_run(folder, checkpoint=checkpoint)
        if (folder / MANIFEST).is_file() and (folder.parent.parent / "resolved.yaml").is_file():
            return _load_trained(folder.parent.parent, load(folder))
    rule = "holds no model: it is not a run, not a checkpoint, and not a folder with a config.yaml or model.yaml."
    raise ConfigError([Problem(key=str(path), rule=rule)])


def refuse_unknown_checkpoint(which: str) -> None:
    """Refuse a name of a checkpoint that no run has.

    Raises:
        ConfigError: it is neither best nor last.
    """
    if which not in ("best", "last"):
        raise ConfigError([Problem(key="checkpoint", value=which, rule="must be best or last.")])


def load_run(folder: Path, *, checkpoint: Which = "last") -> nn.Module:
    """Return the model of a run with the weights of one of its checkpoints; its classes must be of allowed packages."""
    return _load_trained(folder, checkpoint_of(RunFolder(folder), checkpoint))


def _load_trained(folder: Path, weights: Loaded) -> nn.Module:
    cfg = run_config(folder)
    refuse_foreign(cfg.model)
    return model_with(cfg, weights.tensors).eval()


def precision_of(cfg: RunConfig) -> Precision:
    """Return the precision of a run."""
    precision: Precision = build(cfg.precision, "precision")
    return precision


def checkpoint_name(folder: RunFolder, which: Which) -> str | None:
    """Return the name of the best or the last checkpoint of a run; None if there is none."""
    refuse_unknown_checkpoint(which)
    told = (folder.read_result() or {}).get(which)
    if not told:
        with suppress(UnreadableError):
            told = folder.best_and_last()[which]
    name = Path(told or "").name  # the run may have been moved since
    return name if is_checkpoint(name) else None


def checkpoint_of(folder: RunFolder, which: Which) -> Loaded:
    """Load the best or the last checkpoint of a run; without a record of it, the newest complete one is the last.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    name = checkpoint_name(folder, which)
    if name is not None:
        return load_below(folder.checkpoints, name)
    found = newest_valid(folder.checkpoints, report=lambda _: None) if which == "last" else None
    if found is None:
        raise CheckpointError(f"{folder.path} has no checkpoint named {which}.")
    return found


def find_checkpoint(folder: RunFolder, which: Which) -> Checkpoint:
    """Find the best or the last checkpoint of a run, without reading its tensors if its name is recorded.

    Raises:
        CheckpointError: as `checkpoint_of`; damaged tensors are found when they are loaded.
    """
    name = checkpoint_name(folder, which)
    return checkpoint_of(folder, which).checkpoint if name is None else manifest_below(folder.checkpoints, name)


def refuse_foreign(node: Mapping[str, Any]) -> None:
    """Refuse a model whose classes are of packages that are not allowed, without importing them."""
    allowed = allowed_packages()
    problems = []
    for path, target in targets_in(node, ("model",)):
        rule = name_problem(target, allowed)
        if rule is not None and root_of(str(target)) not in allowed:
            package = root_of(str(target))
            rule = f"{package} is not among the packages that models may come from ({', '.join(allowed)}). "
            rule += f"To trust it: {trusting(package)}."
        if rule is not None:
            problems.append(Problem(key=".".join(path), value=target, rule=rule))
    if problems:
        raise ConfigError(problems)


def write_model(folder: Path, model: nn.Module, node: Mapping[str, Any], *, about: Mapping[str, Any]) -> None:
    """Write a model into a new folder: one file of weights with the names of its `state_dict`, and the config that
    builds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    unique, tied = untied({name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()})
    record = write_tensors(folder / WEIGHTS, unique)
    content = {"format": 1, "model": dict(node), "weights": asdict(record), "tied": tied, **about}
    write_atomically(folder / _CONFIG, yaml.safe_dump(content, sort_keys=False))


def _description(file: Path) -> dict[str, Any]:
    """Read the description of a written model.

    Raises:
        UnreadableError: the file is not such a description.
    """
    text = read_text(file, limit=MAX_YAML_BYTES)
    try:
        return expect_map(
            parse_yaml(text), {"model": dict}, optional={"weights": dict, "tied": dict, "files": dict, QUANTIZED: dict}
        )
    except ValueError as error:
        raise UnreadableError(file, str(error)) from None


def _record(file: Path, description: Mapping[str, Any]) -> FileRecord:
    content = description.get("files", {}).get(WEIGHTS, description.get("weights"))
    try:
        record = expect_map(content, {"num_bytes": int, "sha256": str})
        if not record["sha256"]:
            raise ValueError("there is no SHA-256")
    except ValueError as error:
        raise UnreadableError(file, f"of the weights, {error}") from None
    return FileRecord(num_bytes=record["num_bytes"], sha256=record["sha256"])


def _load_written(config: Path) -> nn.Module:
    """Load a written model by its description: a `model.yaml` of an ensemble, or the `config.yaml` of an export."""
    folder, description = config.parent, _description(config)
    refuse_foreign(description["model"])
    with torch.random.fork_rng(devices=[]):
        model: nn.Module = build(description["model"], "model")
    record, tied = _record(config, description), description.get("tied", {})
    file = TensorFile.verified(folder / WEIGHTS, record)
    if QUANTIZED in description:
        return restored_model(config, description[QUANTIZED], model, file)
    try:
        weights = {name: file.read(tied.get(name, name)) for name in model.state_dict()}
        params = (weights[name] for name, _ in model.named_parameters())
        dtypes = (tensor.dtype for tensor in params if tensor.is_floating_point())
        converted_floats(model, next(dtypes, torch.float32))
        model.load_state_dict(weights)
    except (KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{folder / WEIGHTS} holds the weights of another model: {error}") from None
    return model.eval()
