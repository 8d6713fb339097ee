"""The confusion matrix and the worst samples as figures, after evaluations during the training."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import trainkit
from tests.callbacks.run_double import run_double
from trainkit.callbacks.figures.confusion import Confusion
from trainkit.callbacks.figures.sample_pictures import SamplePictures, dataset_of
from trainkit.callbacks.tensorboard import png_bytes
from trainkit.errors import ConfigError
from trainkit.objectives.tables import Table

SHORT = ("steps=4", "epochs=null", "logger=[]", "quiet=true", "seed=3", "eval.every_steps=2", "eval.every_epochs=null")
BOTH = "callbacks=[confusion,sample_pictures]"


def train(folder: Path, *overrides: str) -> dict[str, Any]:
    trainkit.train([*SHORT, *overrides], run_dir=folder)
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def counted(folder: Path, name: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "tables.jsonl").read_text().splitlines()]
    return [one for one in found if one["name"] == name]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("figures") / "run"
    train(folder, "recipe=digits", BOTH)
    return folder


def test_each_evaluation_counts_every_sample_once(run: Path) -> None:
    found = counted(run, "val/confusion")
    assert [one["step"] for one in found] == [2, 4]
    assert [sum(map(sum, (row[1:] for row in one["rows"]))) for one in found] == [360, 360]
    right = sum(row[1 + place] for place, row in enumerate(found[1]["rows"])) / 360
    assert json.loads((run / "result.json").read_text())["metrics"]["val/accuracy"] == pytest.approx(right, abs=1e-12)


def test_the_last_evaluation_is_drawn_and_tensorboard_has_the_picture(run: Path) -> None:
    for kind, folder in (("confusion", "confusion"), ("worst", "samples")):
        png = (run / "plots" / f"{kind}_val.png").read_bytes()
        events = EventAccumulator(str(run / "tensorboard" / folder)).Reload()
        shown = events.Images(f"{kind}_val")[-1]
        assert (shown.step, shown.encoded_image_string) == (4, png)


def test_the_page_has_the_matrix_and_the_pictures(run: Path) -> None:
    page = (run / "report.html").read_text()
    data = json.loads(re.findall(r'id="data">(.*?)</script>', page, re.DOTALL)[0])["figures"]
    (matrix,), (samples,) = data["confusion"], data["samples"]
    assert (matrix["split"], matrix["step"], matrix["samples"], len(matrix["classes"])) == ("val", 4, 360, 10)
    assert matrix["counts"] == [row[1:] for row in counted(run, "val/confusion")[1]["rows"]]
    assert samples["picture"].startswith("data:image/png;base64,")


def test_no_weight_changes_and_another_fingerprint_is_not_made(run: Path, tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", "recipe=digits", "callbacks=[]")
    shown = json.loads((run / "result.json").read_text())
    assert [plain[key] for key in ("weights_sha256", "fingerprint")] == (
        [shown[key] for key in ("weights_sha256", "fingerprint")]
    )


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["recipe=friedman", "callbacks=[confusion]"], "callbacks.confusion: needs classes, and Regression has"),
        (
            ["recipe=friedman", "callbacks=[sample_pictures]"],
            "callbacks.sample_pictures: needs the loss of each sample, and Regression returns none.",
        ),
        (
            ["recipe=shakespeare", "callbacks=[sample_pictures]", "data=python_source"],
            "callbacks.sample_pictures: needs images, (1 or 3, height, width) of 4 pixels or more, and a sample is (",
        ),
    ],
)  # fmt: skip
def test_what_has_no_classes_or_images_is_refused_before_anything_starts(
    overrides: list[str], text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        train(tmp_path / "run", *overrides)
    assert not (tmp_path / "run").exists()


class Drawn:
    """A process that has drawn what it was asked for when it is waited for."""

    requests: list[dict[str, Any]] = []  # noqa: RUF012 - emptied by the fixture

    def __init__(self, request: dict[str, Any]) -> None:
        self.requests.append(request)
        self.running = True

    def wait(self, timeout_s: float) -> str:
        path = Path(self.requests[-1]["path"])
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(png_bytes(torch.zeros(4, 6, 1, dtype=torch.uint8).numpy()))
        return ""


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setattr("trainkit.callbacks.figures.shown.Drawing", Drawn)
    Drawn.requests = []
    return Drawn.requests


def test_only_the_newest_matrix_is_drawn_and_the_last_one_always(
    requests: list[dict[str, Any]], tmp_path: Path
) -> None:
    callback = Confusion()
    for step in (1, 2, 3):
        table = Table.of(torch.eye(2) * step, ["cat", "dog"])
        callback.eval_tables(run_double(tmp_path, step=step), {"val/confusion": table})
    callback.run_end(run_double(tmp_path, step=3), {})
    assert [one["counts"] for one in requests] == [[[1.0, 0.0], [0.0, 1.0]], [[3.0, 0.0], [0.0, 3.0]]]
    events = EventAccumulator(str(tmp_path / "tensorboard" / "confusion")).Reload()
    assert [one.step for one in events.Images("confusion_val")] == [1, 3]


def test_other_ranks_draw_nothing(requests: list[dict[str, Any]], tmp_path: Path) -> None:
    callback, run = Confusion(), run_double(tmp_path, is_owner=False)
    callback.eval_tables(run, {"val/confusion": Table.of(torch.eye(2), ["cat", "dog"])})
    callback.run_end(run, {})
    assert (requests, [*tmp_path.iterdir()]) == ([], [])


def test_an_evaluation_without_a_matrix_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback, run = Confusion(), run_double(tmp_path)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            callback.eval_tables(run, {"val/other": Table.of(torch.eye(2))})
    assert [one.getMessage() for one in caplog.records] == [
        "callbacks=[confusion] draws nothing: outputs are not (samples, classes), or have no targets."
    ]


def test_a_worst_sample_is_drawn_with_its_class_guess_and_probability(
    requests: list[dict[str, Any]], tmp_path: Path
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
