"""The folder of a quantized model, `RUN/quantized/FORMAT`: an export with a description of its quantization.

model.safetensors   the quantized weights, and the weights that stay in float32
config.yaml         the node that builds the model, and under `quantized` further facts for loading
README.md           the model card, with a table that compares it with the original
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import nn

from trainkit.errors import CheckpointError
from trainkit.exporting.trained import TrainedModel, Written
from trainkit.exporting.whole_file import WEIGHTS
from trainkit.files import bytes_needed, refuse_full
from trainkit.quantizing.formats import FORMATS, Quantized, restore
from trainkit.trainer.checkpoint.tensors import TensorFile, write_tensors

QUANTIZED: Final = "quantized"
"""The key of the description that only a quantized model has."""


@dataclass(frozen=True, kw_only=True)
class QuantizedFile:
    """Exports a quantized model."""

    quantized: Quantized
    LOADING: str
    """The section of the model card."""

    def write(self, trained: TrainedModel, draft: Path) -> Written:
        """Write the file of weights into an empty folder."""
        refuse_full(draft / WEIGHTS, bytes_needed(self.quantized.tensors.values()))
        trained.working()
        return Written(files={WEIGHTS: write_tensors(draft / WEIGHTS, self.quantized.tensors)})


def description_of(quantized: Quantized, to: str) -> dict[str, Any]:
    """Return the facts that loading needs, as values of YAML."""
    return {"to": to, **_versions(), "layers": list(quantized.layers), **quantized.facts}


def restored_model(config: Path, description: Mapping[str, Any], model: nn.Module, weights: TensorFile) -> nn.Module:
    """Return the quantized model of a folder.

    Args:
        config: the file of the description, for error messages.
        description: the result of `description_of`; the file may have been changed by others.
        model: built from the node of the folder.
        weights: the verified file.

    Raises:
        ConfigError: torchao is not installed, or torch.export no longer takes the model.
        CheckpointError: the description and the weights are not those of this model.
    """
    to = str(description.get("to"))
    if to not in FORMATS:
        raise CheckpointError(f"{config} has the format {to}, which is none of {', '.join(FORMATS)}.")
    try:
        return restore(model.float().eval(), to, weights.read, description).eval()
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        what = f"{config.parent} holds no quantized form of this model: {error}"
        raise CheckpointError(f"{what}. {_other_versions(description)}".rstrip()) from error


def _versions() -> dict[str, str]:
    """Return the versions of the packages that determine the result of a quantization."""
    return {name: importlib.metadata.version(name) for name in ("torch", "torchao")}


def _other_versions(description: Mapping[str, Any]) -> str:
    now = _versions()
    other = [f"{name} {description.get(name)}" for name, version in now.items() if description.get(name) != version]
    installed = " and ".join(f"{name} {version}" for name, version in now.items())
    if not other:
        return ""
    return f"It was written with {' and '.join(other)}, and {installed} are installed: quantize the run again."
