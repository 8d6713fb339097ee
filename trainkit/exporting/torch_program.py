"""The format `torch_export`: a program of `torch.export`, for PyTorch without the classes of the model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from trainkit.exporting.checking import Check, Inputs, example_of, real_samples, refuse_difference
from trainkit.exporting.fresh_process import tensors_of
from trainkit.exporting.trained import NotExportableError, TrainedModel
from trainkit.frames import named_first_line
from trainkit.numerics.generators import Untouched
from trainkit.trainer.manifest import FileRecord

FILE: Final = "model.pt2"
LOADING: Final = """\
```python
import torch

model = torch.export.load("model.pt2").module()  # needs PyTorch alone; any batch size
outputs = model(inputs)
```

Load such a file only if you trust where it comes from: it is a program.
"""


def write(trained: TrainedModel, draft: Path) -> Mapping[str, FileRecord]:
    """Write `model.pt2`, and check that it computes the same bits as the run.

    Raises:
        NotExportableError: torch.export does not take the model, or the program computes something else.
    """
    model = trained.model()
    samples = real_samples(trained.cfg, model)
    trained.working()
    program = export(model, example_of(samples))
    torch.export.save(program, draft / FILE)
    trained.working()
    request = {"positional": is_positional(model, samples)}
    refuse_difference(Check(form="torch_export", exact=True, request=request), model, samples, draft)
    return {}


def export(model: nn.Module, example: Inputs, *, form: str = "torch_export") -> ExportedProgram:
    """Export a model with a dynamic batch size, for a format.

    Raises:
        NotExportableError: torch.export does not take it; the text has the first line of its error.
    """
    batch = torch.export.Dim("batch", min=1)
    called = plain(model, example)
    args = tuple(example.values()) if is_positional(model, example) else ()
    kwargs = {} if args else dict(example)
    shapes: Any = {name: {0: batch} for name in example}
    if called is not model:  # it takes any arguments
        shapes = {"args": tuple({0: batch} for _ in args), "kwargs": {name: {0: batch} for name in kwargs}}
        shapes = {name: value for name, value in shapes.items() if value}
    try:
        with Untouched(seed=0), torch.no_grad():
            return torch.export.export(called, args, kwargs, dynamic_shapes=shapes)
    except Exception as error:
        raise refused(form, error) from error


def refused(form: str, error: Exception) -> NotExportableError:
    """Return the error of a model that a format does not take."""
    rule = f"the model cannot be exported to {form} with a dynamic batch: {named_first_line(error)}."
    return NotExportableError(f"{rule} safetensors takes any model.")


def is_positional(model: nn.Module, inputs: Inputs) -> bool:
    """Return whether the inputs are the first arguments of a model, so that they need no names.

    Example:
        >>> is_positional(nn.Linear(1, 1), {"input": torch.zeros(1)})
        True
    """
    taken = [*inspect.signature(model.forward).parameters]
    return taken[: len(inputs)] == [*inputs]


def plain(model: nn.Module, example: Inputs) -> nn.Module:
    """Return a model whose outputs are plain tensors: the model itself, or a wrapper that leaves out other objects."""
    with Untouched(seed=0), torch.no_grad():
        outputs = model(**example)
    found = outputs if isinstance(outputs, tuple | list) else [outputs]
    return model if all(isinstance(one, Tensor) for one in found) else TensorsOf(model)


class TensorsOf(nn.Module):
    """A model that returns the tensors among the outputs of another one; its module `model` is left out of names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor, **kwargs: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors in the order of the model's outputs."""
        return tuple(tensors_of(self.model(*args, **kwargs)))
