"""An evaluator beside the run that scores other weights than those of its step is caught here alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.contract.running import run
from trainkit.errors import ConfigError
from trainkit.trainer.manifest import list_complete

POINTS = (
    "model=net", "model.width=8", "data=points", "batch.global_size=16", "batch.micro_size=4", "optimizer=adamw",
    "optimizer.lr=0.05", "steps=6", "eval.every_steps=3", "eval.every_epochs=null", "checkpoint.keep_last=9",
    "average=ema",
)  # fmt: skip
MIRRORED = ("strategy=mirrored", "strategy.replicas=2")
SERVERS = ("strategy=parameter_server", "strategy.workers=2", "strategy.servers=1")
PLACES = {
    "fsdp": ("strategy=fsdp", "strategy.replicas=2"),
    "parameter_server": SERVERS,
}


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(MIRRORED, marks=pytest.mark.slow),
        *(pytest.param(settings, marks=pytest.mark.long) for settings in PLACES.values()),
        pytest.param(("strategy=pipeline", "strategy.replicas=1"), marks=pytest.mark.matrix),
    ],
    ids=["mirrored", *PLACES, "pipeline"],
)
def test_every_checkpoint_is_evaluated_beside_the_training_of_any_strategy(
    settings: tuple[str, ...], tmp_path: Path
) -> None:
    result = run(tmp_path / "run", *POINTS, *settings, "eval.beside=true")
    by_step = {row["step"]: row for row in rows(tmp_path / "run")}
    assert sorted(by_step) == [3, 6]
    written = list_complete(tmp_path / "run/checkpoints")
    assert [saved.metric for saved in written] == [None, None], "the last one is not written again with its metric"
    assert result["evaluator"] == {"status": "finished", "reason": None, "evaluated": 2, "not_evaluated": []}
    plain = run(tmp_path / "plain", *POINTS)
    assert result["metrics"] == pytest.approx(plain["metrics"], rel=1e-12)
    lines = map(json.loads, (tmp_path / "plain/metrics.jsonl").read_text().splitlines())
    for line in (line for line in lines if "val_ema/loss" in line):
        assert {name: by_step[line["step"]][name] for name in plain["metrics"]} == pytest.approx(
            {name: line[name] for name in plain["metrics"]}, rel=1e-12
        )


def test_an_evaluator_that_cannot_stand_beside_a_run_is_refused(tmp_path: Path) -> None:
    for settings, message in (
        ((*SERVERS, "strategy.evaluator=true"), "the strategy has its own evaluator"),
        ((*MIRRORED, "elastic.min_replicas=1"), "the run may continue with fewer tasks"),
        (("callbacks=[early_stop]",), "callbacks.early_stop: needs evaluations during the training"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(tmp_path / "run", *POINTS, *settings, "eval.beside=true")
