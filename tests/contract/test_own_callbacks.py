"""Callbacks as users write them: named where they fail, restored with their tensors, and able to evaluate.

A callback whose tensors a resume forgets, or whose evaluation changes the training is caught here alone.
"""

import json
from pathlib import Path

import pytest
import torch

from tests.contract.running import run, weights
from tests.support.results import result_of
from trainkit.errors import TrainingError
from trainkit.trainer.checkpoint.tensors import load

SAME = (
    "model=net", "data=points", "objective=classification", "optimizer=sgd", "batch.global_size=16",
    "batch.micro_size=4", "steps=6", "log_every_steps=2", "eval.batch_size=4",
)  # fmt: skip


def test_a_callback_that_fails_is_named_with_its_hook(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such thing") as caught:
        run(tmp_path / "run", *SAME, "callbacks=[fails]")
    named = "in the callback tests.support.own_callbacks.Fails, hook step_end"
    assert named in caught.value.__notes__
    assert result_of(tmp_path / "run")["reason"] == f"ValueError: no such thing\nin two lines ({named})"
    assert result_of(tmp_path / "run")["steps"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["one_device", "mirrored"])
def test_an_observer_that_fails_is_left_out_and_the_run_goes_on(strategy: str, tmp_path: Path) -> None:
    same = (*SAME, f"strategy={strategy}", "callbacks=[watches]", "callbacks.watches.hook=log")
    result = run(tmp_path / "run", *same)
    assert (result["status"], result["steps"]) == ("finished", 6)
    assert result["callback_errors"] == [
        {
            "callback": "tests.support.own_callbacks.Watches",
            "hook": "log",
            "error": "ValueError: no such thing\nin two lines",
        }
    ]


def test_an_observer_ends_the_run_where_that_is_asked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such thing"):
        run(tmp_path / "run", *SAME, "callbacks=[watches]", "observer_errors=stop")


@pytest.mark.slow
def test_a_rank_of_several_names_the_callback_too(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"in the callback tests\.support\.own_callbacks\.Fails, hook step_end"):
        run(tmp_path / "run", *SAME, "callbacks=[fails]", "strategy=mirrored", "supervisor.max_restarts=0")


@pytest.mark.parametrize("strategy", ["one_device", "mirrored"])
@pytest.mark.slow
def test_tensors_of_a_callback_are_restored_and_evaluating_changes_nothing(strategy: str, tmp_path: Path) -> None:
    same = (*SAME, f"strategy={strategy}", "callbacks=[averages]", "checkpoint.every_steps=3")
    plain = run(tmp_path / "plain", *SAME, f"strategy={strategy}")
    whole = run(tmp_path / "whole", *same)
    run(tmp_path / "part", *same, "stop_at_step=3")
    resumed = run(tmp_path / "resumed", *same, f"resume={tmp_path / 'part'}")

    for name, expected in weights(plain).items():
        assert torch.equal(weights(whole)[name], expected)
        assert torch.equal(weights(resumed)[name], expected)
    expected_state, state = load(Path(whole["last"])), load(Path(resumed["last"]))
    names = [name for name in expected_state.tensors if name.startswith("callback/")]
    assert len(names) == 4
    assert all(torch.equal(state.tensors[name], expected_state.tensors[name]) for name in names)


@pytest.mark.slow
def test_what_a_callback_evaluates_is_the_same_on_every_placement(tmp_path: Path) -> None:
    rows = []
    for strategy in ("one_device", "mirrored", "fsdp"):
        run(
            tmp_path / strategy, *SAME, f"strategy={strategy}", "callbacks=[averages]", "callbacks.averages.keeps=false"
        )
        lines = (tmp_path / strategy / "averages.jsonl").read_text().splitlines()
        rows.append([json.loads(line) for line in lines])
    assert [row["step"] for row in rows[0]] == [2, 4, 6]
    for other in rows[1:]:
        for one, same in zip(rows[0], other, strict=True):
            assert same == pytest.approx(one, rel=1e-12)


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
@pytest.mark.slow
def test_tensors_that_are_alike_are_kept_where_ranks_save_together(strategy: str, tmp_path: Path) -> None:
    same = (*SAME, "callbacks=[counts]", f"strategy={strategy}")
    run(tmp_path / "part", *same, "stop_at_step=3")
    resumed = run(tmp_path / "resumed", *SAME, "callbacks=[counts]", f"resume={tmp_path / 'part'}")
    assert load(Path(resumed["last"])).tensors["callback/tests.support.own_callbacks.Counts/count"] == 6


@pytest.mark.slow
def test_tensors_that_a_rank_holds_alone_are_refused(tmp_path: Path) -> None:
    said = "the state of the callback tests.support.own_callbacks.Averages holds other tensors on rank 1 than on rank 0"
    with pytest.raises(TrainingError, match=said):
        run(tmp_path / "run", *SAME, "strategy=fsdp", "callbacks=[averages]", "supervisor.max_restarts=0")


def test_a_hook_of_one_rank_alone_cannot_evaluate(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"^val cannot be evaluated in checkpoint_saved: \S+ runs on only one"):
        run(tmp_path / "run", *SAME, "callbacks=[fails]", "callbacks.fails.hook=checkpoint_saved")
