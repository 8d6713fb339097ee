"""Read the flag `--checkpoint` of the verbs that use a trained model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast

from trainkit.config.grammar import refusal


def checkpoint_flag(flags: Mapping[str, str]) -> Literal["best", "last"]:
    """Return the checkpoint that the flag names; the last one without it.

    Raises:
        ConfigError: the value is neither best nor last.

    Example:
        >>> checkpoint_flag({}), checkpoint_flag({"checkpoint": "best"})
        ('last', 'best')
    """
    word = flags.get("checkpoint", "last")
    if word not in ("best", "last"):
        raise refusal(f"--checkpoint {word}", "must be best or last.")
    return cast("Literal['best', 'last']", word)
