"""A run that trains on through too many steps left out, or forgets the suspect step of a rollback, is caught here."""

import json
from pathlib import Path

import pytest

from trainkit.config.sections import NumericsConfig
from trainkit.errors import CheckpointError, NonFiniteError
from trainkit.numerics.batch import BatchPlan
from trainkit.numerics.precision import LossScale, Precision
from trainkit.run.folder.run_result import ROLLBACKS, record_rollback, rollbacks_of, suspect_checkpoint_of
from trainkit.strategies.base import LeftOut
from trainkit.trainer.events import LeftOutSteps, RollbackNeeded, Suspect

PLAN = BatchPlan(num_samples=600, global_size=300, micro_size=300)


def counting(settings: NumericsConfig, *steps: int) -> LeftOutSteps:
    left_out = LeftOutSteps(settings, lambda ticket: range(ticket.step * 300, ticket.step * 300 + 300))
    for step in steps:
        left_out.take(LeftOut.whole(PLAN, step))
    return left_out


def test_a_row_is_counted_from_its_first_step() -> None:
    skip = NumericsConfig(on_nonfinite="skip", max_skips_in_a_row=3)
    left_out = counting(skip, 1, 2, 5, 6)
    assert (left_out.first, left_out.last) == (5, 6)
    with pytest.raises(NonFiniteError, match=r"^numerics\.max_skips_in_a_row=3: steps 5 to 7 were left out"):
        counting(skip, 1, 2, 5, 6, 7)


@pytest.mark.parametrize(("steps", "done"), [(1, 100), (2, 200), (50, 99)])
def test_a_share_is_too_large_only_above_the_limit_and_from_step_100_on(steps: int, done: int) -> None:
    counting(NumericsConfig(on_nonfinite="skip"), *range(0, 2 * steps, 2)).judge_share(done)
    with pytest.raises(NonFiniteError, match=r"^numerics\.max_skipped_share=0\.01: "):
        counting(NumericsConfig(on_nonfinite="skip"), *range(0, 2 * steps + 2, 2)).judge_share(max(done, 100))


def test_of_many_steps_and_samples_the_first_are_listed() -> None:
    findings = counting(NumericsConfig(), *range(0, 2200, 2)).findings()
    assert len(findings["skipped_steps"]) == 1000
    assert findings["skipped_steps_not_listed"] == 100
    assert findings["skipped_steps"][1] == {"step": 2, "samples": list(range(600, 856)), "num_samples": 300}


def test_a_suspect_step_is_kept_until_a_checkpoint_of_a_later_step_is_saved() -> None:
    left_out = counting(NumericsConfig(on_nonfinite="rollback"))
    left_out.train_again(Suspect(step=7, checkpoint=4))
    left_out.saved(7)
    left_out.take(LeftOut.whole(PLAN, 7))
    left_out.saved(8)
    with pytest.raises(RollbackNeeded, match="step 9"):
        left_out.take(LeftOut.whole(PLAN, 9))


@pytest.mark.parametrize(("checkpoint", "is_known"), [(3, False), (4, True), (7, True), (8, False)])
def test_a_resumed_run_finds_its_suspect_step_in_the_record(checkpoint: int, is_known: bool, tmp_path: Path) -> None:
    record_rollback(tmp_path, Suspect(step=2, checkpoint=0))
    record_rollback(tmp_path, Suspect(step=7, checkpoint=4))
    assert rollbacks_of(tmp_path) == [{"step": 2, "checkpoint": 0}, {"step": 7, "checkpoint": 4}]
    assert (suspect_checkpoint_of(tmp_path, checkpoint=checkpoint) is not None) == is_known


def test_a_damaged_record_of_rollbacks_is_named(tmp_path: Path) -> None:
    (tmp_path / ROLLBACKS).write_text(json.dumps({"rollbacks": [{"step": 1}]}))
    with pytest.raises(CheckpointError, match=f"{ROLLBACKS} is not a record of rollbacks: .*checkpoint is missing"):
        rollbacks_of(tmp_path)


def test_a_loss_scale_goes_back_to_that_before_the_overflows_of_a_step_left_out() -> None:
    scale = LossScale(scale=8.0, scaling=Precision(growth_interval=9, max_overflows=3), good_steps=4)
    lower = scale.after(overflow=True).after(overflow=True)
    assert (lower.scale, lower.may_retry) == (2.0, False)
    assert lower.after_skip() == scale
    assert lower.after(overflow=False).after_skip().scale == 2.0
