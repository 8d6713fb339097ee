"""Dumps of NCCL's flight recorder: the last collectives of each rank, which torch writes if one fails or times out.

The recorder of `trainkit.strategies.flight_recorder` records the collectives that a rank has called; that of NCCL
records which of them have begun and ended on the device.
"""

from __future__ import annotations

import re
import shlex
import signal
from typing import Final

import torch

from trainkit.run.folder.run_folder import RunFolder

_ENTRIES: Final = 2000
"""Collectives that are kept for a rank, which bounds its dump; the default of torch 2.13."""
_RANK: Final = re.compile("[0-9]{1,9}")
"""Suffix of the name of a dump; other files are ignored."""
_RENAMED_IN: Final = (2, 10)
"""The version of torch since which the variables begin with TORCH_FR; the older names cause a warning."""


def recorder_variables(folder: RunFolder, *, version: str = torch.__version__) -> dict[str, str]:
    """Return the environment variables that let NCCL's recorder write into a run folder.

    Source: torch/csrc/distributed/c10d/FlightRecorder.hpp and ProcessGroupNCCL.hpp.

    Example:
        >>> from pathlib import Path
        >>> list(recorder_variables(RunFolder(Path("run")), version="2.13.0"))
        ['TORCH_FR_BUFFER_SIZE', 'TORCH_FR_DUMP_TEMP_FILE', 'TORCH_NCCL_DUMP_ON_TIMEOUT']
    """
    is_new = tuple(map(int, version.split(".")[:2])) >= _RENAMED_IN
    size = "TORCH_FR_BUFFER_SIZE" if is_new else "TORCH_NCCL_TRACE_BUFFER_SIZE"
    file = "TORCH_FR_DUMP_TEMP_FILE" if is_new else "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
    return {size: str(_ENTRIES), file: str(folder.nccl_dumps.absolute()), "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


def gave_up_waiting(folder: RunFolder, rank: int, code: int) -> bool:
    """Return whether NCCL's watchdog has ended a rank with this exit code, because one of its exchanges has failed.

    The watchdog first lets every rank write its dump, and after a minute ends the process. The rank that did not enter
    the exchange has no failed exchange itself, and goes on.
    """
    return code == -signal.SIGABRT and folder.nccl_dumps.with_name(f"{folder.nccl_dumps.name}{rank}").is_file()


def dumps_note(folder: RunFolder) -> str:
    """Return a line that names the dumps of a failed run, and the command that compares them; empty without any."""
    start = folder.nccl_dumps
    matches = (_RANK.fullmatch(path.name.removeprefix(start.name)) for path in start.parent.glob(f"{start.name}*"))
    ranks = sorted(int(rank[0]) for rank in matches if rank is not None)
    if not ranks:
        return ""
    names = f"{start.name}{ranks[0]}" + (f" to {start.name}{ranks[-1]}" if len(ranks) > 1 else "")
    compare = shlex.join(["torchfrtrace", "--prefix", start.name, str(start.parent)])
    return f"NCCL's last collectives are in {start.parent}: {names}. To compare them: {compare}"
