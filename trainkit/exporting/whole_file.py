"""The format `safetensors`: whole tensors under the names of the model's `state_dict`, in one file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from trainkit.errors import CheckpointError
from trainkit.exporting.trained import NotExportableError, TrainedModel, Written, checkpoint_keys
from trainkit.files import bytes_needed, refuse_full
from trainkit.strategies.tensor_shards import LazyStateDict, dtype_of, shape_of
from trainkit.trainer.checkpoint.tensors import Kinds, TensorFile, bytes_of, write_stream

WEIGHTS: Final = "model.safetensors"
LOADING: Final = """\
```python
from safetensors.torch import load_file

model = ...  # an instance of the class that config.yaml names, built with the arguments there
model.load_state_dict(load_file("model.safetensors"), strict=True)
model.eval()
```

Where trainkit is installed, `trainkit.load(FOLDER)` builds the model and loads the weights.
"""


def write(trained: TrainedModel, draft: Path) -> Written:
    """Write `model.safetensors`, one tensor after the other: the whole model is never in memory.

    Only a model with a `state_dict` of its own making is built whole, because its hooks convert the tensors.
    """
    names, tensors = sources(trained)
    kinds = _kinds(names, tensors, trained)

    def read(name: str) -> Tensor:
        trained.working()
        return tensors[names[name]]

    refuse_full(
        draft / WEIGHTS, bytes_needed(torch.empty(shape, dtype=dtype, device="meta") for dtype, shape in kinds.values())
    )
    record = write_stream(draft / WEIGHTS, kinds, read)
    trained.working()
    return Written(files={WEIGHTS: record})


def sources(trained: TrainedModel) -> tuple[Mapping[str, str], Mapping[str, Tensor]]:
    """Return name in the model's `state_dict` -> key of its tensor, and the tensors by these keys, read on access.

    Raises:
        NotExportableError: the `state_dict` holds entries that a checkpoint does not have.
    """
    keys = checkpoint_keys(trained.skeleton())
    if keys is not None:
        return keys, trained.weights.tensors
    state = _own_state(trained.model().state_dict())
    return {name: name for name in state}, state


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
            rule = "holds a state_dict, and hooks of the model change its state_dict: give a checkpoint"
            raise CheckpointError(f"{path} {rule}.")
        file = TensorFile.opened(path)
        keys = dict[str, str]()
        for name in file:
            tied = keys.setdefault(names.get(name, f"param/{name}"), name)
            if tied != name and bytes_of(file.read(tied)) != bytes_of(file.read(name)):
                rule = f"holds other values for {tied} than for {name}, which are one tensor in the model"
                raise CheckpointError(
                    f"{path} {rule}. Leave the wrong one out of the file, or untie them in the model."
                )
        return cls(file, keys)

    def __getitem__(self, name: str) -> Tensor:
        return self._file.read(self._keys[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def shape_of(self, name: str) -> torch.Size:
        """Return the shape of a tensor without reading it."""
        return torch.Size(self._file.kind_of(self._keys[name])[1])

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor without reading it."""
        return self._file.kind_of(self._keys[name])[0]

    def region_of(self, name: str, region: tuple[slice, ...]) -> Tensor:
        """Return a part of a tensor."""
        return self[name][region]


def _kinds(keys: Mapping[str, str], tensors: Mapping[str, Tensor], trained: TrainedModel) -> Kinds:
    absent = sorted({key for key in keys.values() if key not in tensors})
    if absent:
        folder = trained.weights.checkpoint.folder
        raise CheckpointError(f"{folder} is a checkpoint of another model: {absent[0]} is missing there.")
    return {name: (dtype_of(tensors, key), tuple(shape_of(tensors, key))) for name, key in keys.items()}


def _own_state(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a `state_dict` that hooks of the model have made.

    Raises:
        NotExportableError: a checkpoint does not hold all of it.
    """
    for name, value in state.items():
        if not isinstance(value, Tensor) or name.rpartition(".")[2] == "_extra_state":
            rule = "is extra state of a module, which a checkpoint does not hold"
            raise NotExportableError(f"the model cannot be exported: {name} of its state_dict {rule}.")
    return dict(state)
