"""An error saves a last checkpoint where the state is that of the end of a step; the run then ends in the same bits.

A checkpoint that is saved in the middle of an update, or with weights that are not finite is caught here alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.running import run
from tests.support import failing
from trainkit.strategies.core.optimizer import OptimizerStepper
from trainkit.trainer import failpoints
from trainkit.trainer.manifest import list_complete

FIXED = (
    "model=net", "model.norm=true", "model.dropout=0.3", "data=points", "batch.global_size=16", "batch.micro_size=5",
    "optimizer=adamw", "optimizer.lr=0.01", "steps=9", "schedule=linear", "clip.max_norm=0.5", "log_every_steps=1",
    "eval.every_steps=3", "eval.metric=val/loss", "checkpoint.every_epochs=null",
    "callbacks.failing={_target_:tests.support.failing.Failing}",
)  # fmt: skip
CENTRAL = "strategy=central_storage"
PHASES = ("data", "forward", "reduce", "update")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], dict[str, Any]]:
    return {strategy: run(tmp_path_factory.mktemp("whole"), *FIXED, *strategy) for strategy in ((), (CENTRAL,))}


@pytest.fixture(autouse=True)
def _mended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    failing.planted.clear()
    failpoints.reload({})


def counts(folder: Path) -> list[int]:
    meta = json.loads((list_complete(folder / "checkpoints")[0].folder / "meta.json").read_text())
    return next(state["counts"] for name, state in meta["callbacks"].items() if name.endswith("Failing"))


def ends_alike(folder: Path, whole: dict[tuple[str, ...], dict[str, Any]], saved_at: int, *overrides: str) -> None:
    """The last checkpoint is that of a step, and the run that goes on from it ends as one that was not disturbed."""
    assert [one.step for one in list_complete(folder / "checkpoints")][:1] == [saved_at]
    assert json.loads((folder / "result.json").read_text())["steps"] == saved_at
    failing.planted.clear()
    failpoints.reload({})
    done = run(folder, *FIXED, *overrides, "resume=auto")
    assert (done["status"], done["steps"]) == ("finished", 9)
    assert done["weights_sha256"] == whole[overrides]["weights_sha256"]
    assert done["metrics"] == whole[overrides]["metrics"]
    assert Path(done["best"]).name == Path(whole[overrides]["best"]).name
    assert counts(folder) == [3, 6, 9]


LONG, MATRIX = pytest.mark.long, pytest.mark.matrix


@pytest.mark.parametrize(
    ("hook", "step"),
    [
        ("step_end", 5),
        ("eval_end", 6),
        pytest.param("step_end", 6, marks=MATRIX),
        pytest.param("log", 5, marks=LONG),
        pytest.param("eval_end", 9, marks=MATRIX),
        pytest.param("train_end", 9, marks=LONG),
    ],
)
@pytest.mark.slow
def test_an_error_of_a_callback_saves_the_step_before_it(
    tmp_path: Path, whole: dict[tuple[str, ...], dict[str, Any]], hook: str, step: int
) -> None:
    failing.planted.add((hook, step))
    with pytest.raises(RuntimeError, match="planted"):
        run(tmp_path, *FIXED)
    ends_alike(tmp_path, whole, step)


@pytest.mark.parametrize("strategy", [(), pytest.param((CENTRAL,), marks=LONG)], ids=["one_device", "central_storage"])
@pytest.mark.parametrize("phase", ["backward", *(pytest.param(one, marks=MATRIX) for one in PHASES)])
@pytest.mark.slow
def test_an_error_within_a_step_saves_the_step_before_it(
    tmp_path: Path, whole: dict[tuple[str, ...], dict[str, Any]], phase: str, strategy: tuple[str, ...]
) -> None:
    """By backward the first shard has moved the statistics of batch normalisation: they are put back."""
    failpoints.reload({"TRAINKIT_FAIL": f"step=5,phase={phase},action=raise"})
    with pytest.raises(RuntimeError, match=f"failpoint in {phase} of step 5"):
        run(tmp_path, *FIXED, *strategy)
    ends_alike(tmp_path, whole, 5, *strategy)


def test_an_error_within_an_update_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier checkpoint stays the last one."""
    plain, calls = OptimizerStepper.step, []

    def interrupted(self: OptimizerStepper, *arguments: Any) -> None:
        plain(self, *arguments)
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("in the middle")

    monkeypatch.setattr(OptimizerStepper, "step", interrupted)
    with pytest.raises(RuntimeError, match="in the middle"):
        run(tmp_path, *FIXED)
    assert [one.step for one in list_complete(tmp_path / "checkpoints")] == [3]


def test_an_error_in_the_first_step_saves_nothing(tmp_path: Path) -> None:
    failpoints.reload({"TRAINKIT_FAIL": "step=0,phase=backward,action=raise"})
    with pytest.raises(RuntimeError, match="failpoint"):
        run(tmp_path, *FIXED)
    assert not (tmp_path / "checkpoints").exists()


def test_parameters_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    failing.planted.add(("step_end", 2))
    with pytest.raises(RuntimeError, match="planted"):
        run(tmp_path, *FIXED, "optimizer.lr=1e308", "schedule=constant", "clip.max_norm=null", "log_every_steps=5")
    assert not (tmp_path / "checkpoints").exists()


def test_a_second_ctrl_c_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failing, "RuntimeError", KeyboardInterrupt, raising=False)
    failing.planted.add(("step_end", 2))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, *FIXED)
    assert not (tmp_path / "checkpoints").exists()
