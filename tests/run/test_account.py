"""A run is held to its plan: its own figures stand beside the planned ones."""

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from trainkit.cli import main
from trainkit.objectives.base import Loss
from trainkit.objectives.classification import Classification
from trainkit.run.estimates import outlook
from trainkit.run.session import account
from trainkit.run.session.account import Figures, Mark, between, differences, line_of, peak_bytes, tcp_bytes


def trained(folder: Path, *overrides: str) -> dict[str, object]:
    assert main(["recipe=digits", "callbacks=[]", "logger=[]", f"hydra.run.dir={folder}", *overrides]) == 0
    found: dict[str, object] = json.loads((folder / "result.json").read_text())
    return found


def test_after_20_steps_the_plan_and_the_measured_step_stand_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(account, "peak_bytes", lambda *_, **__: 10**6)
    result = trained(tmp_path / "run", "steps=24", "hardware=laptop")
    plan, measured = result["plan"], result["measured"]
    assert isinstance(plan, dict)
    assert isinstance(measured, dict)
    assert plan["low_s"] <= plan["step_s"] <= plan["high_s"]
    assert (measured["steps"], measured["at_end"]["steps"]) == (20, 24)
    assert measured["per_cent"]["step_s"] == pytest.approx(100 * (measured["step_s"] / plan["step_s"] - 1), abs=0.1)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("plan: after 20 steps ")]
    assert len(lines) == 1
    written = json.loads((tmp_path / "run/plan.json").read_text())
    assert (written["memory"]["step"], written["time"]["step_s"]) == (plan["memory"], plan["step_s"])
    found = [one["per_cent"]["memory"] for one in (measured, measured["at_end"])]
    planned = [written["memory"]["step"], written["memory"]["evaluation"]]  # it evaluates after 23 steps
    assert found == [round(100 * (10**6 / size - 1), 1) for size in planned]


def test_a_shorter_run_plans_nothing(tmp_path: Path) -> None:
    result = trained(tmp_path / "run", "steps=19", "quiet=true")
    assert not {"plan", "measured", "plan_error"} & result.keys()
    assert not (tmp_path / "run/plan.json").exists()


def test_an_error_of_the_plan_is_recorded_and_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr(outlook, "outlook_of", fails)
    result = trained(tmp_path / "run", "steps=21", "quiet=true")
    assert (result["status"], result["plan"], result["plan_error"]) == ("finished", None, "ValueError: no such thing")


class Remembering(Classification):
    """Adds the loss of the step before, which it remembers."""

    before: ClassVar[Tensor | float] = 0.0

    def score(self, outputs: Tensor, targets: Tensor) -> Loss:
        found = super().score(outputs, targets)
        before, self.__dict__["before"] = self.before, found.loss_sum.detach()
        return replace(found, loss_sum=found.loss_sum + 0.1 * before)


@pytest.mark.slow
def test_the_plan_of_a_running_training_changes_no_state_of_its_objective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ("objective._target_=tests.run.test_account.Remembering", "--allow-package", "tests", "quiet=true")
    held = trained(tmp_path / "held", "steps=24", *own)
    assert "plan_error" not in held
    monkeypatch.setattr(account, "_LAST", 100)
    assert held["metrics"] == trained(tmp_path / "not_held", "steps=24", *own)["metrics"]


class Stubborn(nn.Linear):
    """Reads its numbers in its constructor."""

    built: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__(64, 10)
        self.scale = float(self.weight.sum())
        type(self).built += 1

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.flatten(1))


@pytest.mark.slow
def test_a_model_with_data_is_not_built_a_second_time_beside_the_trained_one(tmp_path: Path) -> None:
    own = ("recipe=null", "data=digits", "model._target_=tests.run.test_account.Stubborn", "--allow-package", "tests")
    counts = []
    for steps in (19, 21):
        Stubborn.built = 0
        folder = tmp_path / str(steps)
        arguments = [*own, "callbacks=[]", "logger=[]", "quiet=true", f"steps={steps}", f"hydra.run.dir={folder}"]
        assert main(arguments) == 0
        counts.append(Stubborn.built)
    assert counts[0] == counts[1]
    found = json.loads((tmp_path / "21/result.json").read_text())
    assert found["plan_error"] == "TrainingError: the model cannot be built without data"


def test_bytes_of_connections_are_counted_while_they_are_open() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as one:
        other, _ = listener.accept()
        with other:
            before = tcp_bytes()
            one.sendall(b"x" * 1000)
            assert len(other.recv(1000, socket.MSG_WAITALL)) == 1000
            after = tcp_bytes()
    assert before is not None
    assert after is not None
    assert after - before >= 2000


def test_on_the_processor_a_small_plan_is_not_compared() -> None:
    cpu = torch.device("cpu")
    assert peak_bytes(cpu, before=0, planned=10**6) is None
    assert (peak_bytes(cpu, before=0, planned=10**9) or 0) > 0


def test_an_unknown_figure_has_no_difference() -> None:
    assert between(Mark(step=5, seconds=1.0, tcp_bytes=None), Mark(step=5, seconds=2.0, tcp_bytes=3)) == (None, None)
    assert between(Mark(step=5, seconds=1.0, tcp_bytes=None), Mark(step=6, seconds=2.0, tcp_bytes=3)) == (1.0, None)
    assert differences(Figures(), Figures(step_s=1.0)) == dict.fromkeys(("memory", "step_s", "bytes_a_step"))
    assert line_of(Figures(step_s=1.0), Figures(memory=1), 20) is None


def test_the_line_names_each_figure_with_what_was_planned() -> None:
    planned, found = Figures(memory=2**30, step_s=0.01), Figures(memory=2**30, step_s=0.02)
    expected = (
        "plan: after 20 steps 1 GiB of memory at the peak (planned 1 GiB, 0 %); 20 ms a step (planned 10 ms, +100 %)"
    )
    assert line_of(planned, found, 20) == expected
