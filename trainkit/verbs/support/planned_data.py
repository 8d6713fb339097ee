"""Read the data flags of the verbs that plan a run without opening its data, and flags that are numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from trainkit.config.grammar import COMMAND_LINE
from trainkit.config.values import whole_number
from trainkit.errors import ConfigError, Problem
from trainkit.verbs.support.call import Call, Flag

if TYPE_CHECKING:
    from trainkit.config.schema import RunConfig
    from trainkit.data.declared import DeclaredData

DATA_FLAGS: Final[Mapping[str, Flag]] = {
    "num-samples": Flag(help="length of the training data, if its class does not declare it", value="N"),
    "open-data": Flag(help="read the data, if its class does not declare its samples"),
}
_MOST_SAMPLES: Final = 10**15


def declared_for(call: Call, cfg: RunConfig) -> DeclaredData | None:
    """Return the splits that the class of the data declares; None with `--open-data`.

    Raises:
        ConfigError: `--num-samples` is not a number, or the class declares another one.
    """
    from trainkit.data.declared import declared_data  # noqa: PLC0415 - imports torch

    num_samples = number_flag(call, "num-samples", "samples", low=1, high=_MOST_SAMPLES)
    if "open-data" in call.flags:
        return None
    long = (cfg.batch.global_size or cfg.batch.micro_size or 1) * 1000
    ends = cfg.steps is not None
    return declared_data(cfg.data, cfg.cv, num_samples=num_samples, unknown_length=long, ends=ends)


def number_flag(call: Call, flag: str, what: str, *, low: int, high: int) -> int | None:
    """Return the whole number of a flag; None without it.

    Raises:
        ConfigError: it is not a whole number between the bounds.

    Example:
        >>> number_flag(Call(flags={"world": "8"}), "world", "GPUs", low=0, high=64)
        8
    """
    text = call.flags.get(flag)
    if text is None:
        return None
    number = whole_number(text, low=low, high=high)
    if number is None:
        rule = f"must be a number of {what}, {high:,} or less."
        raise ConfigError([Problem(key=f"--{flag}", value=text, rule=rule, origin=COMMAND_LINE)])
    return number
