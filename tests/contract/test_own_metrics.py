"""Tables and metrics of torchmetrics: the same on every placement, with short last batches.

A table of a metric that counts the padding or the duplicate samples of a rank is caught here alone.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.contract.running import run
from trainkit.errors import ConfigError

pytestmark = pytest.mark.skipif(find_spec("torchmetrics") is None, reason="torchmetrics is not installed")

SAME = (
    "model=net", "data=points", "objective=classification", "optimizer=sgd", "batch.global_size=16",
    "batch.micro_size=4", "epochs=1", "eval.batch_size=4",
    "+objective.extra_metrics.confusion={_target_: trainkit.objectives.ConfusionMatrix, num_classes: 3}",
    "+objective.extra_metrics.each={_target_: torchmetrics.F1Score, task: multiclass, num_classes: 3, average: none}",
    "+objective.extra_metrics.f1={_target_: torchmetrics.F1Score, task: multiclass, num_classes: 3, average: macro}",
)  # fmt: skip


def tables_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "tables.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_tables_are_the_same_on_every_placement(tmp_path: Path) -> None:
    """11 points in batches of 4: the ranks have 2 and 1, and the last batch is short."""
    results = {name: run(tmp_path / name, *SAME, f"strategy={name}") for name in ("one_device", "mirrored", "fsdp")}

    expected = tables_of(tmp_path / "one_device")
    assert [table["name"] for table in expected] == ["val/confusion", "val/each"]
    assert sum(count for _, *counts in expected[0]["rows"] for count in counts) == 11
    assert results["one_device"]["tables"]["val/confusion"]["rows"] == expected[0]["rows"]
    for name, result in results.items():
        assert tables_of(tmp_path / name) == expected
        assert result["tables"] == results["one_device"]["tables"]
        assert result["metrics"]["val/f1"] == results["one_device"]["metrics"]["val/f1"]


@pytest.mark.slow
def test_a_table_cannot_be_the_monitored_metric(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval\.metric=val/confusion: no such metric"):
        run(tmp_path / "run", *SAME, "eval.metric=val/confusion")
    with pytest.raises(ConfigError, match=r"eval\.metric=val/each: is a table, not a number"):
        run(tmp_path / "run", *SAME, "eval.metric=val/each")
