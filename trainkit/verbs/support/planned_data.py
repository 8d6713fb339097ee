"""Read the data flags of the verbs that plan a run without opening its data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from trainkit.verbs.support.call import Call, Flag

if TYPE_CHECKING:
    from trainkit.config.schema import RunConfig
    from trainkit.data.splits import DeclaredData

DATA_FLAGS: Final[Mapping[str, Flag]] = {
    "num-samples": Flag(
        help="length of the training data, if its class does not declare it", value="N", least=1, most=10**15
    ),
    "open-data": Flag(help="read the data, if its class does not declare its samples"),
}


def declared_for(call: Call, cfg: RunConfig) -> DeclaredData | None:
    """Return the splits that the class of the data declares; None with `--open-data`.

    Raises:
        ConfigError: the class declares another number of samples than `--num-samples`.
    """
    from trainkit.data.splits import declared_data  # noqa: PLC0415 - imports torch

    if "open-data" in call.flags:
        return None
    long = (cfg.batch.global_size or cfg.batch.micro_size or 1) * 1000
    ends = cfg.steps is not None
    return declared_data(cfg.data, cfg.cv, num_samples=call.number("num-samples"), unknown_length=long, ends=ends)
