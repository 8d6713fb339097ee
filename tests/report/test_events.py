from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from trainkit.callbacks.tensorboard import grid, png_bytes
from trainkit.objectives.tables import Table
from trainkit.report.events import EventFile

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


def test_tensorboard_reads_the_scalars_with_their_steps_and_times(tmp_path: Path) -> None:
    events = EventFile(tmp_path)
    events.scalars({"train/loss": 0.5, "lr": 0.25}, step=10, wall_time=1000.5)
    events.scalars({"train/loss": -1.5}, step=3_000_000, wall_time=1001.5)
    events.close()
    assert [(e.wall_time, e.step, e.value) for e in read(tmp_path).Scalars("train/loss")] == [
        (1000.5, 10, 0.5),
        (1001.5, 3_000_000, -1.5),
    ]
    assert [e.value for e in read(tmp_path).Scalars("lr")] == [0.25]


def test_tensorboard_reads_how_often_each_number_was_seen(tmp_path: Path) -> None:
    events = EventFile(tmp_path)
    events.histogram("staleness", {0: 1, 1: 8, 3: 2}, step=11, wall_time=1000.5)
    events.close()
    (found,) = read(tmp_path).Histograms("staleness")
    counts = found.histogram_value
    assert (found.step, counts.min, counts.max, counts.num, counts.sum) == (11, 0, 3, 11, 14)
    assert list(counts.bucket) == [1, 8, 0, 2]
    assert list(counts.bucket_limit) == [0.5, 1.5, 2.5, 3.5]


def test_tensorboard_reads_a_table_as_text(tmp_path: Path) -> None:
    table = Table(columns=("class", "recall"), rows=(("cat", 0.5),))
    events = EventFile(tmp_path)
    events.text("val/each", table.markdown(), step=11, wall_time=1000.5)
    events.close()
    (found,) = read(tmp_path).Tensors("val/each")
    assert (found.step, found.tensor_proto.string_val[0].decode()) == (11, table.markdown())
    metadata = read(tmp_path).SummaryMetadata("val/each")
    assert metadata.plugin_data.plugin_name == "text"


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
    assert [(e.step, e.value) for e in read(tmp_path).Scalars("loss")] == [(10, 10.0), (20, 20.0), (30, -30.0)]


def test_tensorboard_reads_the_picture(tmp_path: Path) -> None:
    events = EventFile(tmp_path)
    pixels = grid(np.arange(2 * 4 * 4, dtype=np.float32).reshape(2, 1, 4, 4))
    events.image("batch", png_bytes(pixels), height=4, width=9, step=0, wall_time=5.0)
    events.close()
    (image,) = read(tmp_path).Images("batch")
    assert (image.height, image.width, image.step) == (4, 9, 0)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_png_holds_exactly_the_pixels(tmp_path: Path, channels: int) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, channels), dtype=np.uint8)
    (tmp_path / "a.png").write_bytes(png_bytes(pixels))
    with image.open(tmp_path / "a.png") as opened:
        assert np.array_equal(np.asarray(opened).reshape(5, 7, channels), pixels)


def test_a_grid_uses_the_full_range_and_keeps_images_apart() -> None:
    images = np.stack([np.full((1, 2, 2), value, np.float32) for value in (-1.0, 0.0, 1.0)])
    assert grid(images, num_columns=2)[:, :, 0].tolist() == [
        [0, 0, 0, 128, 128],
        [0, 0, 0, 128, 128],
        [0, 0, 0, 0, 0],
        [255, 255, 0, 0, 0],
        [255, 255, 0, 0, 0],
    ]


def test_images_without_contrast_are_no_division_by_zero() -> None:
    assert grid(np.ones((1, 1, 1, 1), np.float32)).tolist() == [[[0]]]
