"""The settings of the jobs of a sweep for TensorBoard's HParams page, beside the curves that each job wrote itself."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import summary_pb2
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

from trainkit.report.events import EventFile

__all__ = ["write_hparams"]

_SUFFIX = ".hparams"


def write_hparams(folder: Path, *, settings: Mapping[str, str], name: str, finished: bool) -> None:
    """Write the settings of one job; what an earlier call wrote is replaced.

    See them: tensorboard --logdir SWEEP

    Args:
        folder: where the job's own event files are; its scalars become the columns beside the settings.
        settings: key -> value as typed; those that are numbers become numbers, which TensorBoard draws on axes.
        name: of the job.
        finished: whether it ended as it should.
    """
    for earlier in folder.glob(f"events.out.tfevents.*{_SUFFIX}"):
        earlier.unlink()
    now = time.time()
    start = plugin_data_pb2.SessionStartInfo(group_name=name, start_time_secs=now)
    for key, text in settings.items():
        _put(start.hparams[key], text)
    status = api_pb2.Status.STATUS_SUCCESS if finished else api_pb2.Status.STATUS_FAILURE
    end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=now)
    events = EventFile(folder, suffix=_SUFFIX)
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
