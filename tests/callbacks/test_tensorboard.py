"""A point, count, text, picture or setting that TensorBoard itself reads otherwise than it was written, or that a kill
or resume loses or doubles, is caught here alone.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.callbacks.run_double import row, run_double
from trainkit.callbacks.tensorboard import TensorBoard, grid, images_in
from trainkit.objectives.tables import Table
from trainkit.report.events import EventFile, write_hparams

if TYPE_CHECKING:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def read(folder: Path) -> EventAccumulator:
    """What TensorBoard itself makes of the files of a run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        accumulator = EventAccumulator(str(folder / "tensorboard"))
        accumulator.Reload()
    return accumulator


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars("train/loss")]


def test_tensorboard_reads_scalars_counts_texts_and_pictures(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").mkdir()
    events = EventFile(tmp_path / "tensorboard")
    table = Table(columns=("class", "recall"), rows=(("cat", 0.5),))
    events.scalars({"train/loss": 0.5, "lr": 0.25}, step=10, wall_time=1000.5)
    events.scalars({"train/loss": -1.5}, step=3_000_000, wall_time=1001.5)
    events.histogram("staleness", {0: 1, 1: 8, 3: 2}, step=11)
    events.text("val/each", table.markdown(), step=11)
    pixels = grid(np.arange(2 * 4 * 4, dtype=np.float32).reshape(2, 1, 4, 4))
    events.image("batch", pixels, step=0)
    events.close()
    events.close()
    written = read(tmp_path)
    assert losses(tmp_path) == [(10, 0.5), (3_000_000, -1.5)]
    assert [event.wall_time for event in written.Scalars("train/loss")] == [1000.5, 1001.5]
    (histogram,) = written.Histograms("staleness")
    counts = histogram.histogram_value
    assert (histogram.step, counts.min, counts.max, counts.num, counts.sum) == (11, 0, 3, 11, 14)
    assert (list(counts.bucket), list(counts.bucket_limit)) == ([1, 8, 0, 2], [0.5, 1.5, 2.5, 3.5])
    (text,) = written.Tensors("val/each")
    assert (text.step, text.tensor_proto.string_val[0].decode()) == (11, table.markdown())
    assert written.SummaryMetadata("val/each").plugin_data.plugin_name == "text"
    (image,) = written.Images("batch")
    assert (image.height, image.width, image.step) == (4, 9, 0)


@pytest.mark.slow  # a process of its own: TensorBoard decides once in a process
def test_an_installed_tensorflow_is_never_imported(tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('imported')\n")
    code = (
        "import sys; from pathlib import Path; from trainkit.report.events import EventFile, write_hparams; "
        "EventFile(Path.cwd()).text('a', 'b', step=1); "
        "write_hparams(Path.cwd(), settings={'lr': '1'}, name='0', finished=True); print('tensorflow' in sys.modules)"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.stdout == "False\n", done.stderr


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
    hparams = start.session_start_info.hparams
    assert (hparams["optimizer.lr"].number_value, hparams["model"].string_value) == (0.1, "mlp")
    assert hparams["batch.drop_last"].bool_value
    assert (start.session_start_info.group_name, end.session_end_info.status) == ("3", 1)


def test_a_grid_uses_the_full_range_and_keeps_images_apart() -> None:
    images = np.stack([np.full((1, 2, 2), value, np.float32) for value in (-1.0, 0.0, 1.0)])
    above, gap, below = [0, 0, 0, 128, 128], [0] * 5, [255, 255, 0, 0, 0]
    assert grid(images, num_columns=2)[:, :, 0].tolist() == [above, above, gap, below, below]
    assert grid(np.ones((1, 1, 1, 1), np.float32)).tolist() == [[[0]]]  # without contrast: no division by zero


def written(folder: Path, *steps: int, begun_at: int = 0, example: Any = None, loss: float = 0.5) -> None:
    """Log rows and an evaluation as a run does."""
    run, board = run_double(folder, step=begun_at), TensorBoard()
    run.example = example
    for run.state.step in steps:
        board.log(run, row(run.state.step, loss))
    board.eval_end(run, {"step": 0, "epoch": 0.0, "val/loss": 0.25})
    board.run_end(run, {})
    board.run_end(run, {})


def test_a_row_is_a_point_on_every_curve_but_the_counters_and_the_first_images_are_shown_once(tmp_path: Path) -> None:
    written(tmp_path, 10, 20, example=(torch.rand(9, 1, 8, 8), torch.arange(9)))
    events = read(tmp_path)
    assert sorted(events.Tags()["scalars"]) == ["data_wait", "lr", "samples_per_s", "train/loss", "val/loss"]
    assert losses(tmp_path) == [(10, 0.5), (20, 0.5)]
    assert [(image.height, image.width) for image in events.Images("first batch")] == [(17, 71)]


def test_a_resumed_run_voids_what_its_checkpoint_does_not_hold(tmp_path: Path) -> None:
    written(tmp_path, 10, 20, 30)
    written(tmp_path, 30, begun_at=20, loss=0.25)
    assert losses(tmp_path) == [(10, 0.5), (20, 0.5), (30, 0.25)]


def test_points_are_written_before_a_checkpoint_and_not_at_each_step(tmp_path: Path) -> None:
    run, board = run_double(tmp_path), TensorBoard(flush_s=3600)
    for run.state.step in (10, 20, 30):
        board.log(run, row(run.state.step))
    (file,) = (tmp_path / "tensorboard").iterdir()
    size = file.stat().st_size
    board.state()
    assert file.stat().st_size > size
    assert [step for step, _ in losses(tmp_path)] == [10, 20, 30]  # as a kill leaves the file
    board.run_end(run, {})


def test_images_are_found_by_their_shape_and_what_is_no_number_is_zero() -> None:
    batch: Any = {"image": torch.zeros(70, 3, 4, 5), "mask": [torch.zeros(2, 1, 4, 4)]}
    assert [tuple(images.shape) for images in images_in(batch)] == [(64, 3, 4, 5), (2, 1, 4, 4)]
    for other in (torch.zeros(2, 2, 8, 8), torch.zeros(0, 1, 8, 8), torch.zeros(2, 3, 3, 8), None):
        assert [*images_in(other)] == []
    (images,) = images_in(torch.full((1, 1, 4, 4), math.inf))
    assert images.max() == 0.0
