"""A teacher that trains along, drops out, or is copied into a checkpoint is caught here alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainkit
from tests.contract.running import run, weights
from tests.support import zoo
from trainkit.config.targets.allowed import allow_packages
from trainkit.errors import ConfigError, TrainingError
from trainkit.objectives.base import Loss, Objective, add_terms
from trainkit.objectives.distillation import FrozenModel
from trainkit.run.planning.memory import memory_of, meta_model
from trainkit.run.planning.plan import make_plan
from trainkit.trainer.checkpoint.tensors import load

INPUTS = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
SAME = ("model=net", "data=points", "optimizer=sgd", "batch.global_size=16", "batch.micro_size=4", "epochs=1")


def test_a_frozen_model_is_evaluated_without_gradients_and_one_copy_a_device() -> None:
    norm = nn.BatchNorm1d(3)
    model = nn.Sequential(nn.Linear(4, 3), norm, nn.Dropout(0.5)).train()
    frozen = FrozenModel(model)
    frozen.bind(dtype=torch.float64, load=lambda _folder, _which: nn.Identity())

    first, second = frozen(INPUTS), frozen(INPUTS)

    assert torch.equal(first, second)
    assert first.dtype == torch.float64
    assert not first.requires_grad
    assert not any(param.requires_grad for param in model.parameters())
    assert norm.num_batches_tracked == 0


@pytest.mark.slow
def test_a_teacher_from_a_run_teaches_the_same_on_every_placement(tmp_path: Path) -> None:
    teacher = run(tmp_path / "teacher", *SAME, "objective=classification", "model.width=5")
    taught = ("objective=distillation", f"objective.teacher={tmp_path / 'teacher'}", "objective.share=0.8")
    alone = weights(run(tmp_path / "alone", *SAME, *taught))
    for strategy in ("mirrored", "fsdp", "central_storage"):
        other = run(tmp_path / strategy, *SAME, *taught, f"strategy={strategy}")
        for name, expected in alone.items():
            torch.testing.assert_close(weights(other)[name], expected, rtol=1e-12, atol=1e-13)
        row = json.loads((tmp_path / strategy / "metrics.jsonl").read_text().splitlines()[-1])
        assert {"val/loss", "val/labels", "val/teacher", "val/accuracy"} <= row.keys()
        # It is in no checkpoint, and it has the weights at the end of its own run.
        assert {key.rpartition("/")[2] for key in load(Path(other["last"])).tensors} == {*alone}
    assert weights(teacher)["0.weight"].shape == (5, 6)


def test_the_planned_memory_holds_the_teacher(tmp_path: Path) -> None:
    run(tmp_path / "teacher", "model=net", "data=points", "objective=classification", "epochs=1")
    bare, taught = (
        make_plan(trainkit.compose(["recipe=null", *keys]).cfg)
        for keys in ((), ("objective=distillation", f"objective.teacher={tmp_path / 'teacher'}"))
    )
    with allow_packages(["tests"]):
        sizes = [memory_of(plan, meta_model(plan.cfg)) for plan in (bare, taught)]
    count = sum(param.numel() for param in zoo.Net().parameters())
    assert [size.frozen_bytes for size in sizes] == [0, 4 * count]
    assert sizes[1].total_bytes - sizes[0].total_bytes == 4 * count


def test_a_teacher_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"objective\.teacher=\S+nowhere: is not a run folder"):
        run(tmp_path / "run", *SAME, "objective=distillation", f"objective.teacher={tmp_path / 'nowhere'}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("terms", "said"), [
    (None, "gives the terms none, and its term_names are kl"),
    ({"kl": torch.tensor(1.0), "x": torch.tensor(1.0)}, "gives the terms kl, x, and its term_names are kl"),
    ({"kl": torch.ones(3)}, "must be a tensor of one number"), ({"kl": 1.0}, "must be a tensor of one number"),
])  # fmt: skip
def test_terms_that_are_not_those_named_are_refused(terms: Any, said: str) -> None:
    class Named(Objective):
        term_names = ("kl",)

        def loss(self, model: Any, batch: Any) -> Loss:
            raise NotImplementedError

    with pytest.raises(TrainingError, match=said):
        add_terms({}, Named(), Loss(torch.tensor(1.0), 1.0, terms=terms))
