"""The format `torch_export`: a program of `torch.export`, for PyTorch without the classes of the model."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from trainkit.errors import named_first_line
from trainkit.exporting.checking import Check, example_of, real_samples, refuse_difference
from trainkit.exporting.fresh_process import tensors_of
from trainkit.exporting.trained import Inputs, NotExportableError, TrainedModel, Written, refuse_lack_of_room
from trainkit.numerics.generators import Untouched
from trainkit.trainer.checkpoint.tensors import write_bytes

FILE: Final = "model.pt2"
LOADING: Final = """\
```python
import torch

model = torch.export.load("model.pt2").module()  # needs PyTorch alone; any batch size
outputs = model(inputs)
```

Load such a file only if you trust where it comes from: it is a program.
"""


def write(trained: TrainedModel, draft: Path) -> Written:
    """Write `model.pt2`, and check that it computes the same bits as the run.

    Raises:
        NotExportableError: torch.export does not take the model, or the outputs of the program differ.
    """
    model = trained.model()
    samples = real_samples(trained.cfg, model)
    trained.working()
    refuse_lack_of_room(model, draft / FILE)
    request = {"positional": is_positional(model, samples)}

    def attempt(free: tuple[str, ...]) -> ExportedProgram:
        program = export(model, example_of(samples), free=free)
        save(program, draft / FILE)
        trained.working()
        refuse_difference(Check(form="torch_export", exact=True, request=request, free=free), model, samples, draft)
        return program

    return Written(notes=tuple(filter(None, [try_free_lengths(samples, "torch_export", attempt)])))


def save(program: ExportedProgram, file: Path) -> None:
    """Write a program through a memory buffer, because torch aborts the process if the disk is full."""
    content = io.BytesIO()
    torch.export.save(program, content)
    file.unlink(missing_ok=True)
    write_bytes(file, content.getvalue())


def export(
    model: nn.Module, example: Inputs, *, form: str = "torch_export", free: Sequence[str] = ()
) -> ExportedProgram:
    """Export a model with a dynamic batch size, for a format.

    Args:
        model: in evaluation mode.
        example: inputs of two samples.
        form: the format, for error messages.
        free: inputs whose second dimension is dynamic too, as far as the operations of the model allow that.

    Raises:
        NotExportableError: torch.export does not take it; the message contains the first line of its error.
    """
    batch = Dim("batch", min=1)
    try:
        called = plain(model, example)
    except Exception as error:
        raise refused(form, error) from error
    args = tuple(example.values()) if is_positional(model, example) else ()
    kwargs = {} if args else dict(example)
    sizes: dict[str, Any] = {name: {0: batch, 1: Dim.AUTO} if name in free else {0: batch} for name in example}
    shapes: Any = sizes
    if called is not model:  # it takes any arguments
        shapes = {"args": tuple(sizes.values()) if args else (), "kwargs": sizes if kwargs else {}}
        shapes = {name: value for name, value in shapes.items() if value}
    try:
        with Untouched(seed=0), torch.no_grad():
            program = torch.export.export(called, args, kwargs, dynamic_shapes=shapes)
    except Exception as error:
        raise refused(form, error) from error
    if free:
        longest(program)
    return program


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
    """Return a model whose outputs are plain tensors: the model itself, or a wrapper that drops other objects."""
    with Untouched(seed=0), torch.no_grad():
        outputs = model(**example)
    found = outputs if isinstance(outputs, tuple | list) else [outputs]
    return model if all(isinstance(one, Tensor) for one in found) else TensorsOf(model)


class TensorsOf(nn.Module):
    """A model that returns the tensors among the outputs of another one; the prefix `model` is omitted from names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor, **kwargs: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors in the order of the model's outputs."""
        return tuple(tensors_of(self.model(*args, **kwargs)))


def token_inputs(samples: Inputs) -> tuple[str, ...]:
    """Return the inputs whose second dimension is a number of tokens: integer inputs, and inputs of the same length.

    Example:
        >>> ids, mask = torch.zeros(8, 16, dtype=torch.int64), torch.ones(8, 16)
        >>> token_inputs({"input_ids": ids, "mask": mask, "images": torch.zeros(8, 3, 4, 4)})
        ('input_ids', 'mask')
    """
    long = {name: value.shape[1] for name, value in samples.items() if value.dim() > 1}
    length = next((long[name] for name in long if not samples[name].is_floating_point()), 1)
    return tuple(name for name in long if long[name] == length) if length > 1 else ()


def try_free_lengths(samples: Inputs, form: str, attempt: Callable[[tuple[str, ...]], ExportedProgram]) -> str | None:
    """Write an export with a dynamic number of tokens, or with that of the samples if the model allows no other.

    Args:
        samples: real samples.
        form: the format.
        attempt: writes the export and checks it; its argument is the inputs whose second dimension is dynamic.

    Returns:
        A sentence about the lengths that the export takes; None for a model without tokens.

    Raises:
        NotExportableError: the export is refused in both forms.
    """
    names = token_inputs(samples)
    if not names:
        attempt(())
        return None
    length, named = samples[names[0]].shape[1], " and ".join(names)
    try:
        most = longest(attempt(names))
    except NotExportableError as error:
        attempt(())
        return (
            f"{named}: {length} tokens, and no other number. With a dynamic number, {form} refuses the model: {error}"
        )
    return f"{named}: any number of tokens{'' if most is None else f' up to {most}'}."


def longest(program: ExportedProgram) -> int | None:
    """Return the largest length that a program accepts; None without a limit.

    Raises:
        NotExportableError: the length is fixed.
    """
    limits: list[int] = []
    for node in program.graph.nodes:
        if node.op != "placeholder" or node.name not in program.graph_signature.user_inputs:
            continue
        value: Any = node.meta["val"]
        if value.dim() < 2 or value.is_floating_point():
            continue
        if not isinstance(value.shape[1], torch.SymInt):
            raise NotExportableError("its operations fix the number of tokens.")
        allowed: Any = program.range_constraints.get(value.shape[1].node.expr)
        if allowed is not None and allowed.upper.is_Integer:
            limits.append(int(allowed.upper))
    return min(limits, default=None)
