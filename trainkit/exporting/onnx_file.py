"""The format `onnx`: a file for ONNX Runtime and other programs, in any language."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch
from torch import nn
from torch.export import ExportedProgram

from trainkit.errors import MissingExtraError
from trainkit.exporting import torch_program
from trainkit.exporting.checking import Check, example_of, real_samples, refuse_difference
from trainkit.exporting.torch_program import try_free_lengths
from trainkit.exporting.trained import Inputs, TrainedModel, Written, quiet, refuse_lack_of_room
from trainkit.numerics.generators import Untouched

FILE: Final = "model.onnx"
LOADING: Final = """\
```python
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
outputs = session.run(None, {session.get_inputs()[0].name: inputs})  # NumPy arrays; any batch size
```
"""
_LARGE: Final = 1 << 30
"""Weights of this many bytes or more are stored in a separate file: an ONNX file holds at most 2 GiB."""
_PACKAGES: Final = ("onnx", "onnxscript", "onnxruntime")


def write(trained: TrainedModel, draft: Path) -> Written:
    """Write `model.onnx`, and check that ONNX Runtime computes the same outputs as the run, up to rounding.

    Raises:
        MissingExtraError: a package is not installed.
        NotExportableError: the exporter does not take the model, or the outputs of the file differ.
    """
    for package in _PACKAGES:
        if find_spec(package) is None:
            raise MissingExtraError(key="--to onnx", package=package, extra="onnx")
    model = trained.model()
    samples = real_samples(trained.cfg, model)
    trained.working()
    refuse_lack_of_room(model, draft / FILE)

    def attempt(free: tuple[str, ...]) -> ExportedProgram:
        program = export(model, example_of(samples), draft, free=free)
        trained.working()
        refuse_difference(Check(form="onnx", exact=False, free=free), model, samples, draft)
        return program

    return Written(notes=tuple(filter(None, [try_free_lengths(samples, "onnx", attempt)])))


def export(model: nn.Module, example: Inputs, draft: Path, *, free: Sequence[str] = ()) -> ExportedProgram:
    """Write a model with a dynamic batch size; a large one has its weights in `model.onnx.data`.

    Arguments as in `torch_program.export`.

    Raises:
        NotExportableError: the exporter does not take it; the message contains the first line of its error.
    """
    program = torch_program.export(model, example, form="onnx", free=free)
    try:
        with Untouched(seed=0), quiet(), torch.no_grad():
            torch.onnx.export(
                program,
                f=str(draft / FILE),
                input_names=[*example],
                dynamo=True,
                external_data=sum(one.nbytes for one in model.parameters()) > _LARGE,
                verbose=False,
            )
    except OSError:
        raise
    except Exception as error:
        raise torch_program.refused("onnx", error) from error
    return program
