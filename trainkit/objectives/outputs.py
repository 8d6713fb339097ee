"""Select the scores among the outputs of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trainkit.errors import ConfigError, Problem, TrainingError
from trainkit.objectives.fields import Field, named_fields


def scores_of(outputs: Any, output: Field | None = None) -> Tensor:
    """Return the scores among a model's outputs.

    Args:
        outputs: a tensor, or several in a tuple, a dict or a dataclass.
        output: the key or place of the scores; None: the tensor itself, or the `logits` of an output like those of
            Hugging Face.

    Raises:
        ConfigError: there is no such output.
        TrainingError: nothing names the output, and the model returns several.

    Example:
        >>> import torch
        >>> scores_of({"logits": torch.zeros(2, 3), "past_key_values": None}).shape
        torch.Size([2, 3])
        >>> scores_of((torch.zeros(2, 3), torch.zeros(2)), 1).shape
        torch.Size([2])
    """
    if isinstance(outputs, Tensor) and output is None:
        return outputs
    named = named_fields(outputs)
    if output is not None:
        found = named.get(output)
        if not isinstance(found, Tensor):
            what = f"that output is a {type(found).__name__}" if output in named else "there is no such output"
            rule = f"{what}: the model returns {_described(outputs)}."
            raise ConfigError([Problem(key="objective.output", value=output, rule=rule)])
        return found
    found = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if isinstance(found, Tensor):
        return found
    name = f"a {type(outputs).__name__}" if not named else _described(outputs)
    raise TrainingError(
        f"the model returns {name}, and this objective scores a tensor, or an output with `logits`. Name the output: "
        "objective.output=NAME, a key, or a place in a tuple, from 0."
    )


def _described(outputs: Any) -> str:
    names = [str(name) for name in named_fields(outputs)]
    held = f" with output{'s' if len(names) > 1 else ''} {', '.join(names)}" if names else ""
    return f"a {type(outputs).__name__}{held}"
