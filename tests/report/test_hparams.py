from __future__ import annotations

from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from trainkit.report.events import write_hparams


def read(folder: Path) -> list[Any]:
    (path,) = folder.glob("*.hparams")
    events = [Event.FromString(raw) for raw in RawEventFileLoader(str(path)).Load()]
    return [
        HParamsPluginData.FromString(value.metadata.plugin_data.content)
        for event in events
        for value in event.summary.value
    ]


def test_tensorboard_reads_the_settings_of_a_job(tmp_path: Path) -> None:
    settings = {"optimizer.lr": "0.1", "model": "mlp", "batch.drop_last": "true"}
    write_hparams(tmp_path, settings=settings, name="3", finished=True)
    start, end = read(tmp_path)
    found = start.session_start_info.hparams
    assert (found["optimizer.lr"].number_value, found["model"].string_value) == (0.1, "mlp")
    assert found["batch.drop_last"].bool_value
    assert (start.session_start_info.group_name, end.session_end_info.status) == ("3", 1)


def test_what_was_written_before_is_replaced(tmp_path: Path) -> None:
    write_hparams(tmp_path, settings={"seed": "1"}, name="0", finished=False)
    write_hparams(tmp_path, settings={"seed": "1"}, name="0", finished=True)
    assert read(tmp_path)[1].session_end_info.status == 1
