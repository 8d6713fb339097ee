"""A figure of another evaluation than the last, a matrix that misses samples, or figures that change a weight are
caught here alone: plots, the confusion matrix and the worst samples.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import trainkit
from tests.callbacks.run_double import row, run_double
from tests.report.test_run_page import shown
from trainkit.callbacks import plots
from trainkit.callbacks.every_run import MetricsFile
from trainkit.callbacks.figures.confusion import Confusion
from trainkit.callbacks.figures.sample_pictures import SamplePictures, dataset_of
from trainkit.callbacks.plots import Plots
from trainkit.callbacks.tensorboard import png_bytes
from trainkit.errors import ConfigError
from trainkit.numerics.schedules import lr_points
from trainkit.objectives.tables import Table

SHORT = ("steps=4", "epochs=null", "logger=[]", "quiet=true", "seed=3", "eval.every_steps=2", "eval.every_epochs=null")


def train(folder: Path, *overrides: str) -> dict[str, Any]:
    return trainkit.train([*SHORT, *overrides], run_dir=folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("figures") / "run"
    train(folder, "recipe=digits", "callbacks=[confusion,sample_pictures]")
    return folder


def test_each_evaluation_counts_every_sample_once_and_the_last_one_is_drawn_and_shown(run: Path) -> None:
    tables = [json.loads(line) for line in (run / "tables.jsonl").read_text().splitlines()]
    found = [one for one in tables if one["name"] == "val/confusion"]
    counts = [[row[1:] for row in one["rows"]] for one in found]
    assert [(one["step"], sum(map(sum, rows))) for one, rows in zip(found, counts, strict=True)] == [(2, 360), (4, 360)]
    right = sum(row[place] for place, row in enumerate(counts[1])) / 360
    assert json.loads((run / "result.json").read_text())["metrics"]["val/accuracy"] == pytest.approx(right, abs=1e-12)
    for kind, folder in (("confusion", "confusion"), ("worst", "samples")):
        picture = EventAccumulator(str(run / "tensorboard" / folder)).Reload().Images(f"{kind}_val")[-1]
        assert (picture.step, picture.encoded_image_string) == (4, (run / f"plots/{kind}_val.png").read_bytes())
    figures = shown(run / "report.html")["figures"]
    (matrix,), (samples,) = figures["confusion"], figures["samples"]
    assert (matrix["split"], matrix["step"], matrix["samples"], matrix["counts"]) == ("val", 4, 360, counts[1])
    assert samples["picture"].startswith("data:image/png;base64,")


def test_no_weight_changes_and_another_fingerprint_is_not_made(run: Path, tmp_path: Path) -> None:
    plain, with_them = train(tmp_path, "recipe=digits", "callbacks=[]"), json.loads((run / "result.json").read_text())
    for key in ("weights_sha256", "fingerprint"):
        assert plain[key] == with_them[key]


@pytest.mark.parametrize(
    ("callback", "overrides", "text"),
    [
        ("confusion", ["recipe=friedman"], "needs classes"),
        ("sample_pictures", ["recipe=friedman"], "needs the loss of each sample"),
        ("sample_pictures", ["recipe=shakespeare", "data=python_source"], "needs images"),
    ],
)
def test_what_has_no_classes_or_images_is_refused_before_anything_starts(
    callback: str, overrides: list[str], text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"callbacks.{callback}: {text}")):
        train(tmp_path / "run", *overrides, f"callbacks=[{callback}]")
    assert not (tmp_path / "run").exists()


class Drawn:
    """A process that has drawn what it was asked for when it is waited for."""

    requests: list[Mapping[str, Any]] = []  # noqa: RUF012 - emptied by the fixture
    running = True

    def __init__(self, request: Mapping[str, Any]) -> None:
        self.requests.append(request)

    def wait(self, timeout_s: float) -> str:
        path = Path(self.requests[-1].get("path", ""))
        if path.suffix:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(png_bytes(torch.zeros(4, 6, 1, dtype=torch.uint8).numpy()))
        return ""


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Any]]:
    """What was to be drawn, instead of being drawn by processes."""
    monkeypatch.setattr("trainkit.callbacks.figures.shown.Drawing", Drawn)
    monkeypatch.setattr(plots, "Drawing", Drawn)
    Drawn.requests = []
    return Drawn.requests


def test_only_the_newest_matrix_is_drawn_and_the_last_one_always(
    requests: list[Mapping[str, Any]], tmp_path: Path
) -> None:
    callback = Confusion()
    for step in (1, 2, 3):
        table = Table.of(torch.eye(2) * step, ["cat", "dog"])
        callback.eval_tables(run_double(tmp_path, step=step), {"val/confusion": table})
    callback.run_end(run_double(tmp_path, step=3), {})
    assert [one["counts"] for one in requests] == [[[1.0, 0.0], [0.0, 1.0]], [[3.0, 0.0], [0.0, 3.0]]]
    events = EventAccumulator(str(tmp_path / "tensorboard" / "confusion")).Reload()
    assert [one.step for one in events.Images("confusion_val")] == [1, 3]


def test_a_worst_sample_is_drawn_with_its_class_guess_and_probability(
    requests: list[Mapping[str, Any]], tmp_path: Path
) -> None:
    class Animals:
        classes = ("cat", "dog")

        def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
            return torch.full((3, 4, 4), float(place)), 1

    callback, run = SamplePictures(), run_double(tmp_path)
    run.datasets = {"val": Animals()}
    table = Table(columns=("sample", "loss", "target", "guess", "probability"), rows=((7, 4.0, 1.0, 0.0, 0.98),))
    callback.eval_tables(run, {"val/worst": table, "other/worst": table})
    (request,) = requests
    assert [one["caption"] for one in request["samples"]] == [["dog", "guess cat", "98 %"]]
    assert request["path"].endswith("plots/worst_val.png")
    callback.run_end(run, {})
    assert dataset_of(run, "val_ema") is run.datasets["val"]


def test_a_run_leaves_its_plots(tmp_path: Path) -> None:
    run, file, drawn = run_double(tmp_path, step=10), MetricsFile(), Plots()
    for callback in (drawn, file):
        callback.log(run, row(10))
    file.eval_end(run, {"val/loss": 0.4, "val/accuracy": 0.9})
    for callback in (file, drawn):
        callback.run_end(run, {})
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == ["accuracy.png", "loss.png", "lr.png"]


def test_the_rates_are_drawn_once_and_the_metrics_now_and_then(
    requests: list[Mapping[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drawn, "running", False)
    run, drawn = run_double(tmp_path, num_steps=2), Plots(every_s=1e-9)
    run = replace(run, rates={"body": run.rate, "head": replace(run.rate, peak=0.2)})
    drawn.run_start(run)
    assert requests == []
    for step in (1, 2):
        drawn.log(run, row(step))
    drawn.eval_end(run, {})
    assert [one["draw"] for one in requests] == ["lr", "metrics"]
    assert requests[0]["rates"] == {"body": [[0, 0.1], [1, 0.1]], "head": [[0, 0.2], [1, 0.2]]}


def test_the_curve_of_the_rate_has_the_first_and_the_last_step() -> None:
    for num_steps in (1, 3, 601):
        points = [step for step, _ in lr_points(lambda step: 0.1, num_steps)]
        assert (points[0], points[-1], len(points)) == (0, num_steps - 1, min(600, num_steps))
