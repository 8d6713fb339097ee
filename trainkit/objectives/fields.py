"""Select the fields of a sample or batch, input and target, the scores among the outputs of a model, and the targets
that count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, Final, cast

import torch
from torch import Tensor

from trainkit.errors import ConfigError, DataError, Problem, TrainingError

Field = str | int
"""The key of a field in a dict or dataclass, its index in a tuple, or either in a named tuple."""
Fields = Field | Sequence[Field] | None
"""One field, several fields, or None for the common names."""

INPUTS: Final = ("input", "inputs", "x", "image", "images", "pixel_values", "input_ids", "features")
"""Keys of the input, if `objective.input` names none."""
TARGETS: Final = ("target", "targets", "y", "label", "labels")
"""Keys of the target, if `objective.target` names none."""
IGNORED: Final = -100
"""The target that does not count by default, as in torch."""
MOST_SCORES: Final = 2**24
"""Number of scores of a language model of which an evaluation makes copies at once: 64 MiB in float32."""


def split_batch(batch: Any, input: Fields = None, target: Fields = None) -> tuple[Any, Any]:  # noqa: A002 - the key's name
    """Return inputs and targets of a sample or batch.

    Args:
        batch: a tuple, a dict or a dataclass.
        input: the field of the input; None: the first of a pair, or the only key of a common name (`INPUTS`). Several
            fields give a tuple.
        target: the field of the target; None: the second of a pair, or the only key of a common name (`TARGETS`).

    Raises:
        ConfigError: a field that `objective.input` or `objective.target` names does not exist.
        DataError: the fields are not named, and ambiguous.

    Example:
        >>> split_batch({"input": 1, "target": 2}), split_batch(("a", "b", "c"), 0, 2)
        ((1, 2), ('a', 'c'))
    """
    if input is None and target is None and type(batch) in {tuple, list} and len(batch) == 2:
        return batch[0], batch[1]
    if input is None and target is None and type(batch) is dict:
        names = _common_names(tuple(batch))
    else:
        names = _chosen(batch, input, target)
    named = named_fields(batch)
    return select(named, names[0], "objective.input"), select(named, names[1], "objective.target")


@lru_cache
def _common_names(fields: tuple[Field, ...]) -> tuple[Fields, Fields]:
    return _chosen(dict.fromkeys(fields), None, None)


def input_of(batch: Any, input: Fields = None) -> Any:  # noqa: A002 - the key's name
    """Return the inputs of a sample or batch that may have no targets.

    Without names, a batch that has no fields is the input itself, and so is its only field.

    Raises:
        ConfigError: there is no field of a given name.
        DataError: no name is given, and the field is ambiguous.

    Example:
        >>> input_of({"image": 1}), input_of((2, 3)), input_of("text")
        (1, 2, 'text')
    """
    named = named_fields(batch)
    if input is not None:
        return select(named, input, "objective.input")
    if not named or (isinstance(batch, list) and len(batch) != 2):
        return batch
    if len(_names(named)) == 1:
        return next(iter(named.values()))
    if _is_pair(batch):
        return named[cast("Field", _chosen(batch, None, None)[0])]
    name = "input" if "input" in named else _common(named, INPUTS, 0, "input", batch)
    return select(named, name, "objective.input")


def named_fields(batch: Any) -> Mapping[Field, Any]:
    """Return the fields of a sample or batch: key -> value, or index -> value; empty if it has no fields.

    A named tuple has both.

    Example:
        >>> named_fields((3, 4))
        {0: 3, 1: 4}
    """
    if isinstance(batch, Mapping):
        return batch
    if isinstance(batch, tuple | list):
        names = getattr(batch, "_fields", ())
        return {**dict(enumerate(batch)), **dict(zip(names, batch, strict=False))}
    if is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {}


def select(named: Mapping[Field, Any], field: Fields, key: str) -> Any:
    """Return one field, or a tuple of several.

    Raises:
        ConfigError: there is no such field.
    """
    if isinstance(field, list | tuple):
        return tuple(select(named, name, key) for name in field)
    if field not in named:
        names = ", ".join(_names(named))
        contents = f"a sample has {names}." if names else "a sample is neither a tuple nor a dict nor a dataclass."
        raise ConfigError([Problem(key=key, value=field, rule=f"there is no such field: {contents}")])
    return named[field]  # type: ignore[index]


def chosen_fields(batch: Any, input: Field | None, target: Field | None) -> tuple[Field, Field]:  # noqa: A002
    """Return the names of input and target in a batch: those given, else the common ones.

    Example:
        >>> chosen_fields({"image": 1, "label": 0}, None, None)
        ('image', 'label')
    """
    named = named_fields(batch)
    names = _chosen(batch, input, target)
    for name, key in zip(names, ("input", "target"), strict=True):
        select(named, name, f"data.batch_transform.{key}")
    return cast("tuple[Field, Field]", names)


def with_fields(batch: Any, values: Mapping[Field, Any]) -> Any:
    """Return a batch with other values of some fields: a tuple, or a dict.

    Example:
        >>> with_fields((1, 2), {1: 3}), with_fields({"x": 1, "y": 2}, {"y": 3})
        ((1, 3), {'x': 1, 'y': 3})
    """
    named = {**named_fields(batch), **values}
    if not isinstance(batch, tuple | list):
        return named
    keys = enumerate(getattr(batch, "_fields", range(len(batch))))
    return tuple_like(batch, [named[name if name in values else index] for index, name in keys])


def tuple_like(like: Sequence[Any], parts: Iterable[Any]) -> tuple[Any, ...]:
    """Return parts as a tuple, with the names of a named tuple.

    Example:
        >>> from collections import namedtuple
        >>> tuple_like(namedtuple("Point", "x, y")(1, 2), [3, 4])
        Point(x=3, y=4)
    """
    make: Callable[[Iterable[Any]], tuple[Any, ...]] = getattr(type(like), "_make", tuple)
    return make(parts)


def unused_fields(batch: Any, input: Fields, target: Fields) -> list[str]:  # noqa: A002 - the key's name
    """Return the keys of a dict or dataclass that are neither input nor target; none for a tuple.

    Example:
        >>> unused_fields({"input_ids": 1, "attention_mask": 1, "labels": 0}, None, None)
        ['attention_mask']
    """
    if isinstance(batch, tuple | list):
        return []
    chosen = _chosen(batch, input, target)
    used = {name for entry in chosen for name in (entry if isinstance(entry, list | tuple) else [entry])}
    return [str(name) for name in named_fields(batch) if name not in used]


def _chosen(batch: Any, input: Fields, target: Fields) -> tuple[Fields, Fields]:  # noqa: A002 - the key's name
    """Return the names of input and target: those given, else the common ones."""
    named = named_fields(batch)
    if input is None and target is None:
        if "input" in named and "target" in named:
            return "input", "target"
        if _is_pair(batch) and not all(len([*filter(named.__contains__, names)]) == 1 for names in (INPUTS, TARGETS)):
            return 0, 1
    return (
        _common(named, INPUTS, 0, "input", batch) if input is None else input,
        _common(named, TARGETS, 1, "target", batch) if target is None else target,
    )


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, tuple | list) and len(batch) == 2


def _common(named: Mapping[Field, Any], names: Sequence[str], index: int, what: str, batch: Any) -> Field:
    """Return the only field of a common name, or the index in a pair."""
    matches = [name for name in names if name in named]
    if len(matches) == 1:
        return matches[0]
    if not matches and _is_pair(batch):
        return index
    present = ", ".join(_names(named))
    contents = f"has the fields {present}" if present else f"is one {type(batch).__name__}"
    why = f"{' and '.join(matches)} may both be the {what}" if matches else f"none is known as the {what}"
    raise DataError(
        f"a sample {contents}, and {why}. Name the fields: objective.input=NAME objective.target=NAME, where NAME is a "
        f"key, or an index in a tuple, from 0."
    )


def _names(named: Mapping[Field, Any]) -> list[str]:
    """Return the keys of fields as text, without the indices of a named tuple."""
    return [name for name in named if isinstance(name, str)] or list(map(str, named))


def scores_of(outputs: Any, output: Field | None = None) -> Tensor:
    """Return the scores among a model's outputs.

    Args:
        outputs: a tensor, or several in a tuple, a dict or a dataclass.
        output: the key or index of the scores; None: the tensor itself, or the `logits` of an output like those of
            Hugging Face.

    Raises:
        ConfigError: there is no such output.
        TrainingError: the output is not named, and the model returns several.

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
    names = _names(named)
    contents = f" with output{'s' if len(names) > 1 else ''} {', '.join(names)}" if names else ""
    described = f"a {type(outputs).__name__}{contents}"
    if output is not None:
        scores = named.get(output)
        if not isinstance(scores, Tensor):
            fault = f"that output is a {type(scores).__name__}" if output in named else "there is no such output"
            rule = f"{fault}: the model returns {described}."
            raise ConfigError([Problem(key="objective.output", value=output, rule=rule)])
        return scores
    scores = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if isinstance(scores, Tensor):
        return scores
    raise TrainingError(
        f"the model returns {described}, and this objective scores a tensor, or an output with `logits`. Name the "
        "output: objective.output=NAME, a key, or an index in a tuple, from 0."
    )


def parts_of(scores: Tensor, *others: Tensor) -> list[tuple[Tensor, ...]]:
    """Return scores and their targets in parts along the first dimension, each of `MOST_SCORES` scores at most."""
    size = max(MOST_SCORES // max(scores[0].numel(), 1), 1) if len(scores) else 1
    return list(zip(*(torch.split(tensor, size) for tensor in (scores, *others)), strict=True))


def exact(scores: Tensor) -> Tensor:
    """Return scores in float32, or float64 if they already are: a sum of logarithms in bf16 keeps two digits."""
    return scores if scores.dtype in {torch.float32, torch.float64} else scores.float()


def counted_in(targets: Tensor, ignore_index: int | None) -> Tensor | None:
    """Return which targets count: a bool tensor of their shape, on their device; None if all of them do.

    The weight of a shard, its loss, hits and metrics are all sums over these targets. Probabilities of classes always
    count, as in torch.

    Args:
        targets: whole numbers, or probabilities.
        ignore_index: the target that does not count; None: every target counts.

    Example:
        >>> counted_in(torch.tensor([2, -100]), -100)
        tensor([ True, False])
    """
    return None if ignore_index is None or targets.is_floating_point() else targets != ignore_index
