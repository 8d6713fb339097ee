"""An event file that TensorBoard reads otherwise than it was written is caught here alone: its own reader reads it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from trainkit.callbacks.tensorboard import grid, png_bytes
from trainkit.objectives.tables import Table
from trainkit.report.events import EventFile, write_hparams

if TYPE_CHECKING:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def read(folder: Path) -> EventAccumulator:
    """What TensorBoard itself makes of the files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        accumulator = EventAccumulator(str(folder), purge_orphaned_data=True)
        accumulator.Reload()
    return accumulator


def test_tensorboard_reads_scalars_counts_texts_and_pictures(tmp_path: Path) -> None:
    events, table = EventFile(tmp_path), Table(columns=("class", "recall"), rows=(("cat", 0.5),))
    events.scalars({"train/loss": 0.5, "lr": 0.25}, step=10, wall_time=1000.5)
    events.scalars({"train/loss": -1.5}, step=3_000_000, wall_time=1001.5)
    events.histogram("staleness", {0: 1, 1: 8, 3: 2}, step=11, wall_time=1000.5)
    events.text("val/each", table.markdown(), step=11, wall_time=1000.5)
    pixels = grid(np.arange(2 * 4 * 4, dtype=np.float32).reshape(2, 1, 4, 4))
    events.image("batch", png_bytes(pixels), height=4, width=9, step=0, wall_time=5.0)
    events.close()
    found = read(tmp_path)
    points = [(one.wall_time, one.step, one.value) for one in found.Scalars("train/loss")]
    assert points == [(1000.5, 10, 0.5), (1001.5, 3_000_000, -1.5)]
    (histogram,) = found.Histograms("staleness")
    counts = histogram.histogram_value
    assert (histogram.step, counts.min, counts.max, counts.num, counts.sum) == (11, 0, 3, 11, 14)
    assert (list(counts.bucket), list(counts.bucket_limit)) == ([1, 8, 0, 2], [0.5, 1.5, 2.5, 3.5])
    (text,) = found.Tensors("val/each")
    assert (text.step, text.tensor_proto.string_val[0].decode()) == (11, table.markdown())
    assert found.SummaryMetadata("val/each").plugin_data.plugin_name == "text"
    (image,) = found.Images("batch")
    assert (image.height, image.width, image.step) == (4, 9, 0)


def test_nothing_is_written_between_two_flushes(tmp_path: Path) -> None:
    events = EventFile(tmp_path)
    (file,) = tmp_path.iterdir()
    size = file.stat().st_size
    events.scalars({"loss": 1.0}, step=1, wall_time=1.0)
    assert file.stat().st_size == size
    events.flush()
    assert file.stat().st_size > size
    events.close()
    events.close()


def test_a_resumed_run_voids_the_points_after_its_checkpoint(tmp_path: Path) -> None:
    first = EventFile(tmp_path)
    for step in (10, 20, 30):
        first.scalars({"loss": float(step)}, step=step, wall_time=float(step))
    first.close()
    second = EventFile(tmp_path, purge_after=20)
    second.scalars({"loss": -30.0}, step=30, wall_time=31.0)
    second.close()
    assert [(one.step, one.value) for one in read(tmp_path).Scalars("loss")] == [(10, 10.0), (20, 20.0), (30, -30.0)]


@pytest.mark.parametrize("channels", [1, 3])
def test_a_png_holds_exactly_the_pixels(tmp_path: Path, channels: int) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, channels), dtype=np.uint8)
    (tmp_path / "a.png").write_bytes(png_bytes(pixels))
    with image.open(tmp_path / "a.png") as opened:
        assert np.array_equal(np.asarray(opened).reshape(5, 7, channels), pixels)


def test_a_grid_uses_the_full_range_and_keeps_images_apart() -> None:
    images = np.stack([np.full((1, 2, 2), value, np.float32) for value in (-1.0, 0.0, 1.0)])
    above, gap, below = [0, 0, 0, 128, 128], [0] * 5, [255, 255, 0, 0, 0]
    assert grid(images, num_columns=2)[:, :, 0].tolist() == [above, above, gap, below, below]
    assert grid(np.ones((1, 1, 1, 1), np.float32)).tolist() == [[[0]]]  # without contrast: no division by zero


def test_tensorboard_reads_the_settings_of_a_job_and_its_last_end(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    settings = {"optimizer.lr": "0.1", "model": "mlp", "batch.drop_last": "true"}
    for has_finished in (False, True):
        write_hparams(tmp_path, settings=settings, name="3", finished=has_finished)
    (path,) = tmp_path.glob("*.hparams")
    events = [Event.FromString(raw) for raw in RawEventFileLoader(str(path)).Load()]
    values = [value for event in events for value in event.summary.value]
    start, end = (HParamsPluginData.FromString(value.metadata.plugin_data.content) for value in values)
    found = start.session_start_info.hparams
    assert (found["optimizer.lr"].number_value, found["model"].string_value) == (0.1, "mlp")
    assert found["batch.drop_last"].bool_value
    assert (start.session_start_info.group_name, end.session_end_info.status) == ("3", 1)
