"""`eval.beside=true`: an evaluator in a process of its own beside a run of any strategy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.contract.running import run
from trainkit.errors import ConfigError

POINTS = (
    "model=net", "model.width=8", "data=points", "batch.global_size=16", "batch.micro_size=4", "optimizer=adamw",
    "optimizer.lr=0.05", "steps=6", "eval.every_steps=3", "eval.every_epochs=null", "checkpoint.keep_last=9",
    "average=ema",
)  # fmt: skip
PLACES = {
    "one_device": (),
    "mirrored": ("strategy=mirrored", "strategy.replicas=2"),
    "fsdp": ("strategy=fsdp", "strategy.replicas=2"),
    "pipeline": ("strategy=pipeline", "strategy.stages=2", "strategy.replicas=1"),
    "parameter_server": ("strategy=parameter_server", "strategy.workers=2", "strategy.servers=1"),
    "central_storage": ("strategy=central_storage", "strategy.compute_devices=[cpu,cpu]"),
    "tensor_parallel": (
        "strategy=tensor_parallel", "strategy.degree=2", "strategy.replicas=1", "strategy.plan={0:colwise,2:rowwise}",
    ),
}  # fmt: skip


MARKS = dict.fromkeys(("fsdp", "pipeline", "parameter_server"), pytest.mark.long)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "place", [pytest.param(p, marks=() if p == "mirrored" else MARKS.get(p, pytest.mark.matrix)) for p in PLACES]
)
@pytest.mark.slow
def test_every_checkpoint_is_evaluated_beside_the_training_of_any_strategy(place: str, tmp_path: Path) -> None:
    result = run(tmp_path / "run", *POINTS, *PLACES[place], "eval.beside=true")
    found = {row["step"]: row for row in rows(tmp_path / "run")}
    assert sorted(found) == [3, 6]
    assert result["evaluator"] == {"status": "finished", "reason": None, "evaluated": 2, "not_evaluated": []}
    plain = run(tmp_path / "plain", *POINTS)
    assert result["metrics"] == pytest.approx(plain["metrics"], rel=1e-12)
    lines = map(json.loads, (tmp_path / "plain/metrics.jsonl").read_text().splitlines())
    for own in (line for line in lines if "val_ema/loss" in line):
        assert {name: found[own["step"]][name] for name in plain["metrics"]} == pytest.approx(
            {name: own[name] for name in plain["metrics"]}, rel=1e-12
        )


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            (*PLACES["parameter_server"], "strategy.evaluator=true"),
            "eval.beside=true: the strategy has its own evaluator. Leave one of them out.",
        ),
        (
            (*PLACES["mirrored"], "elastic.min_replicas=1"),
            "eval.beside=true: the run may continue with fewer tasks (elastic.min_replicas). Leave one of them out.",
        ),
        (
            ("callbacks=[early_stop]",),
            "callbacks.early_stop: needs evaluations during the training, which eval.beside",
        ),
    ],
)
def test_an_evaluator_that_cannot_stand_beside_a_run_is_refused(
    tmp_path: Path, settings: tuple[str, ...], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        run(tmp_path / "run", *POINTS, *settings, "eval.beside=true")
    assert any(str(problem).startswith(told) for problem in caught.value.problems), caught.value
