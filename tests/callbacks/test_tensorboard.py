"""A point of a TensorBoard curve that a kill or resume loses or doubles, or a missed picture, is caught here alone."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.callbacks.run_double import row, run_double
from trainkit.callbacks.tensorboard import TensorBoard, images_in

if TYPE_CHECKING:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def read(folder: Path) -> EventAccumulator:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        accumulator = EventAccumulator(str(folder / "tensorboard"))
        accumulator.Reload()
    return accumulator


def written(
    folder: Path, *, step: int = 0, steps: tuple[int, ...] = (10,), example: tuple[torch.Tensor, ...] | None = None
) -> EventAccumulator:
    run, board = run_double(folder, step=step), TensorBoard()
    run.example = example
    for run.state.step in steps:
        board.log(run, row(run.state.step))
    board.eval_end(run, {"step": 0, "epoch": 0.0, "val/loss": 0.25})
    board.run_end(run, {})
    board.run_end(run, {})
    return read(folder)


def test_a_row_is_a_point_on_every_curve_but_the_counters(tmp_path: Path) -> None:
    found = written(tmp_path, example=(torch.rand(9, 64), torch.arange(9)))
    assert sorted(found.Tags()["scalars"]) == ["data_wait", "lr", "samples_per_s", "train/loss", "val/loss"]
    assert [(event.step, event.value) for event in found.Scalars("train/loss")] == [(10, 0.5)]
    assert found.Tags()["images"] == []


def test_the_images_of_the_first_batch_are_shown_once(tmp_path: Path) -> None:
    found = written(tmp_path, steps=(10, 20), example=(torch.rand(9, 1, 8, 8), torch.arange(9)))
    assert [(image.height, image.width) for image in found.Images("first batch")] == [(17, 71)]


def test_a_resumed_run_voids_what_its_checkpoint_does_not_hold(tmp_path: Path) -> None:
    written(tmp_path, steps=(10, 20, 30))
    found = written(tmp_path, step=20, steps=(30,))
    assert [event.step for event in found.Scalars("train/loss")] == [10, 20, 30]


def test_a_run_killed_after_a_checkpoint_has_every_point_up_to_it(tmp_path: Path) -> None:
    run, board = run_double(tmp_path), TensorBoard(flush_s=3600)
    for run.state.step in (10, 20, 30):
        board.log(run, row(run.state.step))
    board.state()
    found = read(tmp_path)  # as a kill leaves the file
    board.run_end(run, {})
    assert [event.step for event in found.Scalars("train/loss")] == [10, 20, 30]


def test_images_are_found_by_their_shape_and_what_is_no_number_is_zero() -> None:
    batch: Any = {"image": torch.zeros(70, 3, 4, 5), "mask": [torch.zeros(2, 1, 4, 4)]}
    assert [tuple(images.shape) for images in images_in(batch)] == [(64, 3, 4, 5), (2, 1, 4, 4)]
    for other in (torch.zeros(2, 2, 8, 8), torch.zeros(0, 1, 8, 8), torch.zeros(2, 3, 3, 8), None):
        assert [*images_in(other)] == []
    (images,) = images_in(torch.full((1, 1, 4, 4), math.inf))
    assert images.max() == 0.0
