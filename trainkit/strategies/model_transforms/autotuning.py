"""Leave the reports of torch's autotuner out of standard error: `compile.mode=max-autotune`."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Final

_REPORTS: Final = {"autotune_num_choices_displayed": 0, "max_autotune_report_choices_stats": False}
"""Settings of `torch._inductor.config` for a report of the kernels of each operation; not every torch has both."""
_UNFIT: Final = "Exception %s for benchmark choice %s"
"""The message about a kernel that cannot be compiled for the device; torch takes another one, or raises an error."""


def quiet_autotuning() -> None:
    """Switch off the tables of kernels, and the tracebacks of kernels that do not fit the device.

    A report that the environment requests stays on: `TORCHINDUCTOR_` and a name of `_REPORTS` for its table,
    `TORCH_LOGS` for the tracebacks.
    """
    from torch._inductor import config  # noqa: PLC0415 - slow to import, and most runs compile nothing

    for name, value in _REPORTS.items():
        if hasattr(config, name) and f"TORCHINDUCTOR_{name.upper()}" not in os.environ:
            setattr(config, name, value)
    if "TORCH_LOGS" not in os.environ:
        logging.getLogger("torch._inductor.select_algorithm").addFilter(_is_wanted)
    # torch itself asks a tensor for its deprecated storage when it checks the arguments of a kernel
    warnings.filterwarnings("ignore", "TypedStorage is deprecated", module=r"torch\._inductor\.select_algorithm")


def _is_wanted(record: logging.LogRecord) -> bool:
    return record.msg != _UNFIT
