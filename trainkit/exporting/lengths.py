"""Dynamic sizes of an exported model other than the batch: the number of tokens of a sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram

from trainkit.exporting.inputs import Inputs
from trainkit.exporting.trained import NotExportableError


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
