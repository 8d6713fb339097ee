"""Write the settings of a sweep's jobs for TensorBoard's HParams page, beside the curves that each job wrote itself."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import summary_pb2
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

from trainkit.report.events import EventFile
from trainkit.trainer.ownership import OwnershipToken

__all__ = ["write_hparams"]

_SUFFIX = "hparams"


def write_hparams(folder: Path, *, settings: Mapping[str, str], name: str, finished: bool) -> None:
    """Write the settings of one job; they replace what an earlier call wrote for this run.

    The name of the file contains the token of the run, if it has one: such a file without the token stays.

    To view them: tensorboard --logdir SWEEP

    Args:
        folder: the folder of the job's own event files; its scalars become the columns beside the settings.
        settings: key -> value as typed; numbers become numbers, which TensorBoard draws on axes.
        name: the name of the job.
        finished: whether it ended regularly.
    """
    owner = OwnershipToken.found(folder.parent)
    suffix = f".{_SUFFIX}" if owner is None else f".{owner.token}.{_SUFFIX}"
    ours = re.compile(rf"events\.out\.tfevents\.\d+\..*\.\d+\.\d+{re.escape(suffix)}")  # as EventFile names them
    for earlier in folder.glob(f"events.out.tfevents.*{suffix}"):
        if ours.fullmatch(earlier.name):
            earlier.unlink()
    now = time.time()
    start = plugin_data_pb2.SessionStartInfo(group_name=name, start_time_secs=now)
    for key, text in settings.items():
        _put(start.hparams[key], text)
    status = api_pb2.Status.STATUS_SUCCESS if finished else api_pb2.Status.STATUS_FAILURE
    end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=now)
    events = EventFile(folder, suffix=suffix)
    started = plugin_data_pb2.HParamsPluginData(session_start_info=start)
    events.summary(_summary(metadata.SESSION_START_INFO_TAG, started), wall_time=now)
    ended = plugin_data_pb2.HParamsPluginData(session_end_info=end)
    events.summary(_summary(metadata.SESSION_END_INFO_TAG, ended), wall_time=now)
    events.close()


def _put(value: Any, text: str) -> None:
    if text in ("true", "false"):
        value.bool_value = text == "true"
        return
    try:
        value.number_value = float(text)
    except ValueError:
        value.string_value = text


def _summary(tag: str, data: Any) -> bytes:
    summary = summary_pb2.Summary()
    summary.value.add(tag=tag, metadata=metadata.create_summary_metadata(data), tensor=metadata.NULL_TENSOR)
    return bytes(summary.SerializeToString())
