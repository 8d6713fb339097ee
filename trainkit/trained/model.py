"""One way to a trained model: what a path names, and its weights in a model, on the CPU.

A path names a run (its last or best checkpoint), one checkpoint, or a folder or file of weights with a description:
what a run, `export`, `quantize` and `ensemble` write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch
import yaml
from torch import Tensor, nn

from trainkit.config.identity import run_config
from trainkit.config.interface import trusting
from trainkit.config.targets.allowed import allow_packages, allowed_packages, name_problem, root_of, targets_in
from trainkit.config.targets.build import build
from trainkit.errors import CheckpointError, ConfigError, Problem, UnreadableError, refuse
from trainkit.files import MAX_YAML_BYTES, expect_map, parse_yaml, read_text, write_atomically
from trainkit.numerics.precision import converted_floats
from trainkit.strategies.tensor_shards import LazyStateDict
from trainkit.trained.build import Which, find_checkpoint, model_with, refuse_unknown_checkpoint
from trainkit.trained.quantized import QUANTIZED, restored_model
from trainkit.trainer.checkpoint.saving import untied
from trainkit.trainer.checkpoint.tensors import TensorFile, bytes_of, load, write_tensors
from trainkit.trainer.manifest import MANIFEST, FileRecord, read_manifest

WEIGHTS: Final = "model.safetensors"
CONFIG: Final = "config.yaml"
"""The description of an exported or quantized model."""
BEST: Final = "best"
"""Name of the subfolder with the best weights, in the folder of the last weights."""
_MODEL: Final = "model.yaml"
"""The description of an ensemble."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A trained model that a path names."""

    path: str
    """The run, or the folder of a written model."""
    description: Path
    """The manifest of a checkpoint, or the file that describes a written model; both hold hashes of the weights."""
    folder: Path
    """Folder for evaluations: the run, or the folder of a written model outside of a run."""
    run: Path | None
    """The run whose data and objective belong to the model; None: unknown."""
    label: str
    """Name of the weights: `last`, `best`, the name of the checkpoint, or the path of the written model in its run."""
    step: int | None = None
    """Updates of the weights, if they come from a checkpoint."""


def find_trained(path: Path, which: Which) -> Trained:
    """Find what a path names, without reading the weights.

    Raises:
        ConfigError: there is no model.
        CheckpointError: the run has no such checkpoint, or it is incomplete.
    """
    refuse_unknown_checkpoint(which)
    if (path / "resolved.yaml").is_file():
        checkpoint = find_checkpoint(path, which)
        file = checkpoint.folder / MANIFEST
        return Trained(path=str(path), description=file, folder=path, run=path, label=which, step=checkpoint.step)
    run = path.absolute().parent.parent
    if (path / MANIFEST).is_file() and (run / "resolved.yaml").is_file():
        file, step = path / MANIFEST, read_manifest(path).step
        return Trained(path=str(run), description=file, folder=run, run=run, label=path.name, step=step)
    folder = path.parent if path.name == WEIGHTS and path.is_file() else path
    if (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file():
        best = folder / BEST
        file = (best if which == "best" and best.is_dir() else folder) / CONFIG
    elif not (file := folder / _MODEL).is_file():
        rule = "there is no such file or folder."
        if path.exists():
            files = f"a {WEIGHTS} and the {CONFIG} or {_MODEL} that builds its model"
            rule = f"holds no model: it is neither a run, nor a checkpoint of one, nor a folder with {files}."
        raise ConfigError([Problem(key=str(path), rule=rule)])
    enclosing = next((parent for parent in folder.absolute().parents[:3] if (parent / "resolved.yaml").is_file()), None)
    label: str = which
    if enclosing is not None:  # An export is replaced as a whole: nothing else is written into its folder.
        label = "_".join([*folder.absolute().relative_to(enclosing).parts, *(["best"] if which == "best" else [])])
    run_of = enclosing or _first_member(folder)
    return Trained(path=str(folder), description=file, folder=enclosing or folder, run=run_of, label=label)


def _first_member(folder: Path) -> Path | None:
    """Return the best member of an ensemble, whose data and objective all members share."""
    try:
        described = parse_yaml(read_text(folder / _MODEL, limit=MAX_YAML_BYTES))
        members = expect_map(described, {"made_of": list})["made_of"]
    except (UnreadableError, ValueError):
        return None
    first = Path(str(members[0])) if members else None
    return first if first is not None and (first / "resolved.yaml").is_file() else None


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
    with allow_packages(packages):
        return load_described(find_trained(path, checkpoint).description)


def load_described(file: Path) -> nn.Module:
    """Return the model of a manifest of a checkpoint, or of the description of a written model; as `load_model`."""
    if file.name == MANIFEST:
        cfg = run_config(file.parent.parent.parent)
        refuse_foreign(cfg.model)
        return model_with(cfg, load(file.parent).tensors).eval()
    try:
        optional = dict.fromkeys(("weights", "tied", "files", QUANTIZED), dict)
        described = expect_map(parse_yaml(read_text(file, limit=MAX_YAML_BYTES)), {"model": dict}, optional=optional)
        kinds = {"num_bytes": int, "sha256": str}
        entry = expect_map(described.get("files", {}).get(WEIGHTS, described.get("weights")), kinds)
        if not entry["sha256"]:
            raise ValueError("of the weights, there is no SHA-256")
    except ValueError as error:
        raise UnreadableError(file, str(error)) from None
    refuse_foreign(described["model"])
    with torch.random.fork_rng(devices=[]):
        model: nn.Module = build(described["model"], "model")
    record = FileRecord(num_bytes=entry["num_bytes"], sha256=entry["sha256"])
    weights, tied = TensorFile.verified(file.parent / WEIGHTS, record), described.get("tied", {})
    if QUANTIZED in described:
        return restored_model(file, described[QUANTIZED], model, weights)
    try:
        state = {name: weights.read(tied.get(name, name)) for name in model.state_dict()}
        params = (state[name] for name, _ in model.named_parameters())
        dtypes = (tensor.dtype for tensor in params if tensor.is_floating_point())
        converted_floats(model, next(dtypes, torch.float32))
        model.load_state_dict(state)
    except (KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{file.parent / WEIGHTS} holds the weights of another model: {error}") from None
    return model.eval()


def refuse_foreign(node: Mapping[str, Any]) -> None:
    """Refuse a model whose classes are of packages that are not allowed, without importing them."""
    allowed = allowed_packages()
    problems = []
    for path, target in targets_in(node, ("model",)):
        rule, package = name_problem(target, allowed), root_of(str(target))
        if rule is not None and package not in allowed:
            rule = f"{package} is not among the packages that models may come from ({', '.join(allowed)}). "
            rule += f"To trust it: {trusting(package)}."
        if rule is not None:
            problems.append(Problem(key=".".join(path), value=target, rule=rule))
    refuse(problems)


def write_model(folder: Path, model: nn.Module, node: Mapping[str, Any], *, about: Mapping[str, Any]) -> None:
    """Write a model into a new folder: one file of weights with the names of its `state_dict`, and the config that
    builds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    unique, tied = untied({name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()})
    record = write_tensors(folder / WEIGHTS, unique)
    content = {"format": 1, "model": dict(node), "weights": asdict(record), "tied": tied, **about}
    write_atomically(folder / _MODEL, yaml.safe_dump(content, sort_keys=False))


def checkpoint_keys(model: nn.Module) -> dict[str, str] | None:
    """Return name in the model's `state_dict` -> key in a checkpoint; tied names have the same key.

    Returns:
        None if the `state_dict` holds something else than the model's unchanged parameters and buffers, for example
        because a hook of the model renames or converts them.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> model[1].weight = model[0].weight
        >>> keys = checkpoint_keys(model)
        >>> keys["0.weight"], keys["1.weight"], keys["1.bias"]
        ('param/0.weight', 'param/0.weight', 'param/1.bias')
    """
    keys = {id(tensor): f"buffer/{name}" for name, tensor in model.named_buffers()}
    keys |= {id(tensor): f"param/{name}" for name, tensor in model.named_parameters()}
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    if any(not isinstance(tensor, Tensor) or id(tensor) not in keys for tensor in state.values()):
        return None
    return {name: keys[id(tensor)] for name, tensor in state.items()}


class FileWeights(LazyStateDict):
    """The tensors of a safetensors file by their names in a checkpoint, read on access."""

    def __init__(self, file: TensorFile, keys: Mapping[str, str]) -> None:
        """Make the mapping; `keys` is name in a checkpoint -> key in the file."""
        self._file, self._keys = file, keys

    @classmethod
    def of(cls, path: Path, model: nn.Module) -> Self:
        """Open a file with the names of a model's `state_dict`, written by any program.

        An unknown name is treated as a parameter; loading the weights then reports it.

        Raises:
            CheckpointError: it is no safetensors file, the `state_dict` of the model is made by a hook, or the file has
                several values for one tensor of the model.
        """
        names = checkpoint_keys(model)
        if names is None:
            rule = "holds a state_dict, and hooks of the model change its state_dict: give a checkpoint."
            raise CheckpointError(f"{path} {rule}")
        file = TensorFile.opened(path)
        keys = dict[str, str]()
        for name in file:
            tied = keys.setdefault(names.get(name, f"param/{name}"), name)
            if tied != name and bytes_of(file.read(tied)) != bytes_of(file.read(name)):
                rule = f"holds other values for {tied} than for {name}, which are one tensor in the model"
                raise CheckpointError(f"{path} {rule}. Leave the wrong one out of the file, or untie them there.")
        return cls(file, keys)

    def __getitem__(self, name: str) -> Tensor:
        return self._file.read(self._keys[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def meta_of(self, name: str) -> Tensor:
        """Return a tensor on the meta device, with shape and dtype of a tensor that is not read."""
        dtype, shape = self._file.kind_of(self._keys[name])
        return torch.empty(shape, dtype=dtype, device="meta")

    def region_of(self, name: str, region: tuple[slice, ...]) -> Tensor:
        """Return a part of a tensor."""
        return self[name][region]
