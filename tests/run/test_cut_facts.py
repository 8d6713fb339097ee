"""Train, plan and prove state equally whether another number of replicas is the same training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainkit import api
from trainkit.cli import main
from trainkit.config.compose import compose
from trainkit.config.schema import RunConfig
from trainkit.run.planning import notes as cut_facts
from trainkit.run.planning.coupling import COUPLES, OBJECTIVE, Coupling
from trainkit.run.planning.notes import coupling_of, cut_notes
from trainkit.run.planning.plan import RunPlan, make_plan

DRAWING = ("recipe=digits", "model.dropout=0.2", "batch.global_size=60")
DRAWS = (
    "the model draws random numbers: on another number of replicas it is the same training only at an equal "
    "batch.micro_size (here 60)."
)


def plan_of(*arguments: str) -> RunPlan:
    return make_plan(RunConfig.from_dict(compose(arguments).values))


@pytest.mark.slow
def test_train_and_plan_print_the_same_note(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *DRAWING]) == 0
    assert f"  note: {DRAWS}" in capsys.readouterr().out.splitlines()
    api.train(api.compose([*DRAWING, "stop_at_step=1"]))
    assert f"  note: {DRAWS}" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("more", ["batch.micro_size=30", "numerics.reproducible=true", "strategy=local_sgd"])
def test_nothing_is_run_where_the_cut_does_not_follow_the_replicas(more: str) -> None:
    def unasked() -> Coupling:
        raise AssertionError

    assert cut_notes(plan_of(*DRAWING, more), unasked) == []


def test_a_large_model_is_not_run_before_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_facts, "_CHEAP", 9_000)
    plan, model = plan_of(*DRAWING), nn.Linear(100, 100)
    why = "coupling: not probed, the model has 10,100 parameters, more than 9,000: trainkit prove probes it."
    assert cut_notes(plan, lambda: coupling_of(plan, model)) == [why]
    assert coupling_of(plan, model, at_any_size=True).text == "the model draws random numbers"


def test_an_objective_that_declares_it_couples_without_being_run(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(*DRAWING)
    monkeypatch.setattr(type(plan.components.objective), "couples_samples", True)
    assert coupling_of(plan, nn.Linear(1, 1)) == Coupling(found=((OBJECTIVE, COUPLES),))


class Ragged:
    """Samples of many lengths; every `alike`-th has the same."""

    def __init__(self, alike: int) -> None:
        self.alike = alike

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(6 if index % self.alike == 0 else 100 + index), index


def test_samples_of_one_shape_are_looked_for() -> None:
    found = cut_facts._samples_of_one_shape(Ragged(alike=4))
    assert not isinstance(found, str)
    assert [inputs.shape for inputs, _ in found] == [(6,)] * 8
    assert len({index for _, index in found}) == 8
    why = "there are not 4 samples of one shape among the first 32"
    assert cut_facts._samples_of_one_shape(Ragged(alike=32)) == why


@pytest.mark.slow
def test_the_training_is_not_disturbed(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = ["recipe=digits", "model.dropout=0.2", "model.batch_norm=true", "stop_at_step=3"]
    probed = api.train(api.compose(short))
    monkeypatch.setattr("trainkit.run.runner.cut_notes", lambda *_: [])
    assert api.train(api.compose(short))["weights_sha256"] == probed["weights_sha256"]
