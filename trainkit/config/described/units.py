"""The unit of a key that holds a quantity: declared, or derived from its name or its documentation."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from typing import Any, Final

from trainkit.config.values import plain
from trainkit.fields import Unit

NO_UNIT: Final = "none"
"""The unit of a key that holds no quantity: text, a choice, a path, true or false, an index."""
PLAIN_NUMBER: Final = "a plain number"
"""The unit of a factor, a rate or a seed."""
_RATE: Final = re.compile(r"(10\^\d+ \w+|[A-Z][A-Za-z]+) (?:a|per) second\b")
"""A documentation line that begins with a rate: `10^9 bytes a second of that memory`."""
_ENDINGS: Final = (
    (re.compile(r"(.*_)?s"), "seconds"),
    (re.compile(r"(.*_)?us"), "microseconds"),
    (re.compile(r"(.*_)?usd_h"), "US dollars an hour"),
    (re.compile(r"(.*_)?mb"), "MiB"),
    (re.compile(r"(.*_)?bytes"), "bytes"),
    (re.compile(r"(.*_)?epochs|every_epochs"), "epochs"),
    (re.compile(r"(.*_)?steps|stop_at_step|start_step"), "steps"),
    (re.compile(r"(.*_)?every|max_skips_in_a_row"), "steps"),
    (re.compile(r"(.*_)?share"), "a share, 0 to 1"),
    (re.compile(r"(in_)?channels"), "channels"),
    (re.compile(r"hidden|width"), "units"),
    (re.compile(r"vocab_size"), "tokens"),
    (re.compile(r"latent"), "numbers"),
    (re.compile(r"reduction"), "jobs"),
    (re.compile(r"retries"), "restarts"),
    (re.compile(r"(.*_)?(batch_size|samples|val_size)"), "samples"),
    (re.compile(r"(.*_)?(seed|fold)"), PLAIN_NUMBER),
    (
        re.compile(
            r"lr|eps|betas|momentum|dampening|weight_decay|temperature|gamma|end|mean|deviation|delta|min_delta"
            r"|class_weights|ignore_index|max_norm|initial_scale|min_scale|min_factor|threshold|shape|powersgd_rank"
        ),
        PLAIN_NUMBER,
    ),
)
"""Names of keys, of trainkit's classes and of torch's, and the unit of each."""
_LEADS: Final = re.compile(
    r"(?:`?\w+`?: )?(?:the )?(?:(?:most|fewest|largest|smallest|number of|numbers of|side length in|length in|width of|"
    r"size of|how often|updates?) )*",
    re.IGNORECASE,
)
"""Words with which a documentation line may begin before the unit."""
_NOUNS: Final[Mapping[str, str]] = {
    "share": "a share, 0 to 1",
    "shares": "a share, 0 to 1",
    "fraction": "a share, 0 to 1",
    "part": "a share, 0 to 1",
    "factor": PLAIN_NUMBER,
    "deviation": PLAIN_NUMBER,
    "gib": "GiB",
    "mib": "MiB",
    "gpus": "GPUs",
    "passes": "epochs",
    "updates": "steps",
}
_COUNTED: Final = frozenset(
    {
        "seconds",
        "steps",
        "epochs",
        "samples",
        "tokens",
        "processes",
        "replicas",
        "ranks",
        "devices",
        "cores",
        "threads",
        "jobs",
        "bytes",
        "pixels",
        "images",
        "classes",
        "shards",
        "batches",
        "evaluations",
        "stages",
        "workers",
        "characters",
        "rows",
        "features",
        "channels",
        "checkpoints",
        "restarts",
        "points",
        "tasks",
        "groups",
        "copies",
        "blocks",
        "heads",
        "inputs",
        "outputs",
        "lengths",
        "parts",
        "sums",
        "hosts",
        "lines",
        "servers",
        "overflows",
        "columns",
        "files",
    }
)


def unit_of(name: str, hint: Any, meaning: str) -> str | None:
    """Return the unit of a key; `NO_UNIT` for a key that holds no quantity, None if unknown.

    Args:
        name: the last part of the key.
        hint: its annotation, which may declare the unit: `Annotated[float, unit("GiB")]`.
        meaning: its line of documentation.

    Example:
        >>> unit_of("timeout_s", float, ""), unit_of("workers", int | None, "Processes that compute.")
        ('seconds', 'processes')
        >>> unit_of("path", str, "Length of a text."), unit_of("size", int, "How large it is.")
        ('none', None)
    """
    declared = next((extra.name for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Unit)), None)
    if declared is not None:
        return declared
    if not holds_quantity(hint):
        return NO_UNIT
    by_name = (
        None if _RATE.match(meaning) else next((found for ending, found in _ENDINGS if ending.fullmatch(name)), None)
    )
    return by_name or _named_in(meaning)


def holds_quantity(hint: Any) -> bool:
    """Return whether the values are numbers, alone or in a list; a number beside text is an index or a name.

    Example:
        >>> holds_quantity(int | None), holds_quantity(list[float]), holds_quantity(int | str), holds_quantity(bool)
        (True, True, False, False)
    """
    kinds = set(_scalars_in(hint))
    return bool(kinds & {int, float}) and str not in kinds


def _scalars_in(hint: Any) -> typing.Iterator[Any]:
    hint = plain(hint)
    if typing.get_origin(hint) is typing.Literal:
        return
    arguments = typing.get_args(hint)
    if not arguments:
        yield hint
    mapping = isinstance(typing.get_origin(hint), type) and issubclass(typing.get_origin(hint), Mapping)
    for argument in arguments[1:] if mapping else arguments:
        yield from _scalars_in(argument)


def _named_in(meaning: str) -> str | None:
    """Return the unit that a line of documentation begins with: `Seconds between two writes.`."""
    if rate := _RATE.match(meaning):
        return f"{rate[1]}/s"
    rest = meaning[_LEADS.match(meaning).end() :] if _LEADS.match(meaning) else meaning  # type: ignore[union-attr]
    for word in re.findall(r"[A-Za-z]+", rest)[:6]:
        lower = str(word).lower()
        if lower in _NOUNS:
            return _NOUNS[lower]
        if lower in _COUNTED:
            return lower
    return None
