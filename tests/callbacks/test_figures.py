"""A figure of another evaluation than the last, a matrix that misses samples, or figures that change a weight are
caught here alone: plots, the confusion matrix and the worst samples.
A count in the wrong bucket, a gradient before the sum of its shards or with its loss scale, and histograms that
change a weight are caught here alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import trainkit
from tests.callbacks.run_double import Alone, row, run_double
from tests.report.test_run_page import shown
from trainkit.callbacks.every_run import MetricsFile
from trainkit.callbacks.figures import Plots, SamplePictures, captioned, dataset_of
from trainkit.callbacks.histograms import NUM_COUNTS, Distribution, Histograms, measure, summed
from trainkit.errors import ConfigError
from trainkit.numerics.schedules import lr_points
from trainkit.objectives.tables import Table
from trainkit.trainer.events import Run

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
    picture = EventAccumulator(str(run / "tensorboard/samples")).Reload().Images("worst_val")[-1]
    assert (picture.step, picture.width, picture.height) == (4, 832, 280)
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


def test_a_worst_sample_is_drawn_with_its_class_guess_and_probability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Animals:
        classes = ("cat", "dog")

        def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
            return torch.full((3, 4, 4), float(place)), 1

    told = list[Sequence[str]]()

    def keep(images: Sequence[Any], captions: Sequence[Sequence[str]]) -> Any:
        told.extend(captions)
        return captioned(images, captions)

    monkeypatch.setattr("trainkit.callbacks.figures.captioned", keep)
    callback, run = SamplePictures(), run_double(tmp_path)
    run.datasets = {"val": Animals()}
    table = Table(columns=("sample", "loss", "target", "guess", "probability"), rows=((7, 4.0, 1.0, 0.0, 0.98),))
    callback.eval_tables(run, {"val/worst": table, "other/worst": table})
    callback.run_end(run, {})
    assert told == [("dog", "guess cat", "98 %")]
    assert (tmp_path / "plots/worst_val.png").read_bytes().startswith(b"\x89PNG")
    assert dataset_of(run, "val_ema") is run.datasets["val"]


def test_a_run_leaves_a_picture_of_its_losses(tmp_path: Path) -> None:
    run, file, drawn = run_double(tmp_path, step=10), MetricsFile(), Plots()
    file.log(run, row(10))
    file.eval_end(run, {"val/loss": 0.4, "val/accuracy": 0.9})
    for callback in (file, drawn):
        callback.run_end(run, {})
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["loss.png"]


def test_the_curve_of_the_rate_has_the_first_and_the_last_step() -> None:
    for num_steps in (1, 3, 601):
        points = [step for step, _ in lr_points(lambda step: 0.1, num_steps)]
        assert (points[0], points[-1], len(points)) == (0, num_steps - 1, min(600, num_steps))


FOUR_STEPS = ("recipe=null", "steps=4", "epochs=null", "logger=[]", "quiet=true", "seed=3", "batch.global_size=32")
EACH = ("callbacks=[histograms]", "callbacks.histograms.every_steps=2")


def hashes_of(folder: Path, *overrides: str) -> list[str]:
    """Hash of the weights, and the fingerprint."""
    result = trainkit.train([*FOUR_STEPS, *overrides], run_dir=folder)
    return [result["weights_sha256"], result["fingerprint"]]


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "histograms.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run_with_histograms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with histograms, whose weights and fingerprint are those of a run without."""
    folder = tmp_path_factory.mktemp("histograms")
    assert hashes_of(folder / "shown", *EACH) == hashes_of(folder / "plain", "callbacks=[]")
    return folder / "shown"


@pytest.mark.slow
def test_the_first_step_and_each_that_divides_are_recorded_and_shown_by_tensorboard(
    run_with_histograms: Path,
) -> None:
    found = records(run_with_histograms)
    assert [one["step"] for one in found] == [1, 2, 4]
    assert [*found[0]] == ["step", "gradients", "activations", "weights"]
    assert [*found[0]["gradients"]] == [*found[0]["weights"]]
    events = EventAccumulator(
        str(run_with_histograms / "tensorboard/histograms"), size_guidance={"histograms": 0}
    ).Reload()
    names = {f"{kind}/{name}" for kind in found[0] if kind != "step" for name in found[0][kind]}
    assert {*events.Tags()["histograms"]} == names
    assert [one.step for one in events.Histograms(min(names))] == [1, 2, 4]


def test_the_gradient_is_the_one_of_the_update_whatever_the_shards_and_the_loss_scale(
    run_with_histograms: Path, tmp_path: Path
) -> None:
    hashes_of(tmp_path / "run", *EACH, "batch.micro_size=8", "precision=fp16_mixed")
    whole, cut = records(run_with_histograms)[0], records(tmp_path / "run")[0]
    for kind in ("gradients", "activations"):
        for name, one in whole[kind].items():
            assert cut[kind][name]["rms"] == pytest.approx(one["rms"], rel=0.02)  # 2^-10, the step of fp16, a few times


def test_activations_alone_are_recorded(tmp_path: Path) -> None:
    hashes_of(tmp_path / "run", *EACH, "callbacks.histograms.kinds=[activations]")
    assert [[*one] for one in records(tmp_path / "run")] == [["step", "activations"]] * 3


def test_a_resumed_run_drops_the_records_of_steps_that_it_trains_again(tmp_path: Path) -> None:
    (tmp_path / "histograms.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 4)))
    Histograms().run_start(run_double(tmp_path, step=2))
    assert [one["step"] for one in records(tmp_path)] == [1, 2]


def test_values_are_counted_in_the_bucket_that_holds_them_and_what_is_not_finite_apart() -> None:
    values = torch.tensor([0.0, 1.0, -1.0, -3.0, 4.0, float("nan"), float("inf")])
    found = Distribution.of(*measure(values))
    shown = found.to_json()
    assert (found.num_finite, shown["nonfinite"], shown["zero_share"]) == (5, 2, 0.2)
    assert (found.total, found.squares, found.low, found.high) == (1.0, 27.0, -3.0, 4.0)
    assert found.quantiles((0.2, 1.0)) == [0.0, pytest.approx(4.0, rel=0.1)]
    limits, counts = found.buckets()
    uppers = [limit for limit, count in zip(limits, counts, strict=True) for _ in range(count)]
    for value, upper in zip((-3.0, -1.0, 0.0, 1.0), uppers, strict=False):
        assert value <= upper <= value + 0.2 * abs(value) + 1e-9  # a quarter of an octave
    assert (limits, len(uppers), uppers[-1]) == (sorted(limits), 5, 4.0)


def test_values_beyond_the_buckets_and_empty_tensors_are_counted() -> None:
    found = Distribution.of(*measure(torch.tensor([1e-30, -1e30], dtype=torch.bfloat16)))
    assert (found.num_finite, sum(found.buckets()[1])) == (2, 2)
    empty = Distribution.of(*measure(torch.zeros(0)))
    assert (empty.num_finite, empty.buckets(), empty.to_json()["quantiles"]) == (0, ([], []), None)


def test_buckets_of_parts_add_up_to_those_of_the_whole() -> None:
    class Two(Alone):
        """Adds what the other of two ranks holds."""

        def __init__(self, other: torch.Tensor) -> None:
            self.other = measure(other)

        def sum(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor + self.other[0]

        def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
            return [tensor, self.other[1][None]]

    whole = torch.randn(100, generator=torch.Generator().manual_seed(0))
    found = summed({"w": measure(whole[:30])}, {"w": True}, Two(whole[30:]))["w"]
    expected = measure(whole)
    assert torch.equal(found[0][:NUM_COUNTS], expected[0][:NUM_COUNTS])
    assert torch.equal(found[1], expected[1])
    copied = summed({"w": measure(whole)}, {"w": False}, Two(whole))["w"]
    assert int(copied[0][:NUM_COUNTS].sum()) == 100  # a copy of another rank's part counts once


def started(folder: Path, model: nn.Module, **settings: Any) -> tuple[Run, Histograms]:
    run, callback = run_double(folder, step=1), Histograms(**settings)
    run.model = model
    callback.run_start(run)
    return run, callback


def test_a_step_that_is_not_recorded_or_left_out_has_no_hook_and_takes_nothing(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    run, callback = started(tmp_path, model, every_steps=10)
    for step, hooks in ((0, 1), (1, 0), (8, 0), (9, 1), (10, 0)):
        callback.phase_listener()("data", step)
        assert (callback.gradient_listener().wants(step), len(model[0]._forward_hooks)) == (bool(hooks), hooks)
        callback.step_end(run, None)  # type: ignore[arg-type] # not read
        assert not model[0]._forward_hooks
    assert not (tmp_path / "histograms.jsonl").exists()


def test_what_backward_computes_again_counts_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    _, callback = started(tmp_path, model, every_steps=1)
    for phase in ("data", "forward", "backward"):
        callback.phase_listener()(phase, 0)
        model(torch.ones(5, 2))
    (found,) = callback._recorder._found["activations"].values()
    assert int(found[0][:NUM_COUNTS].sum()) == 15


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("strategy=local_sgd", "not under LocalSgd"),
        ("compile.mode=default", "records no gradient with compile.mode=default"),
        ("callbacks.histograms.kinds=[]", "callbacks.histograms.kinds=[]: is empty"),
    ],
)
def test_where_nothing_can_be_shown_the_run_is_refused_before_it_starts(
    override: str, text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        hashes_of(tmp_path / "run", "callbacks=[histograms]", override)
    assert not (tmp_path / "run").exists()


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["mirrored", "fsdp"])
def test_two_ranks_count_what_one_counts(strategy: str, run_with_histograms: Path, tmp_path: Path) -> None:
    of_two = [f"strategy={strategy}", "strategy.replicas=2", "batch.micro_size=16"]
    assert hashes_of(tmp_path / "run", *EACH, *of_two) == hashes_of(tmp_path / "plain", "callbacks=[]", *of_two)
    one, two = records(run_with_histograms), records(tmp_path / "run")
    assert [row["step"] for row in two] == [1, 2, 4]
    for name, found in one[0]["gradients"].items():
        assert two[0]["gradients"][name]["rms"] == pytest.approx(found["rms"], rel=1e-4)  # fp32 sums in another order
    assert two[0]["weights"] == one[0]["weights"]
