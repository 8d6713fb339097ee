"""Histograms of gradients, activations and weights: what they count, and that no training notices them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import trainkit
from tests.callbacks.run_double import Alone, run_double
from trainkit.callbacks.figures.distribution import NUM_COUNTS, Distribution, measure
from trainkit.callbacks.figures.histograms import Histograms, observed_layers, summed
from trainkit.cli import main
from trainkit.errors import ConfigError
from trainkit.models.gpt import Gpt
from trainkit.strategies.base import UpdateTensors

SHORT = ("recipe=null", "steps=4", "epochs=null", "logger=[]", "quiet=true", "seed=3", "batch.global_size=32")
EACH = ("callbacks=[histograms]", "callbacks.histograms.every_steps=2")


def train(folder: Path, *overrides: str) -> str:
    trainkit.train([*SHORT, *overrides], run_dir=folder)
    sha: str = json.loads((folder / "result.json").read_text())["weights_sha256"]
    return sha


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "histograms.jsonl").read_text().splitlines()]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no process that draws."""

    class Undrawn:
        running = False

        def __init__(self, request: object) -> None:
            pass

        def wait(self, timeout_s: float) -> str:
            return ""

    monkeypatch.setattr("trainkit.callbacks.figures.shown.Drawing", Undrawn)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str, str]:
    folder = tmp_path_factory.mktemp("histograms")
    plain, shown = folder / "plain", folder / "shown"
    return plain, shown, train(plain, "callbacks=[]"), train(shown, *EACH)


def test_no_number_of_a_training_changes(runs: tuple[Path, Path, str, str]) -> None:
    plain, shown, without, with_them = runs
    assert with_them == without
    assert (
        json.loads((shown / "result.json").read_text())["fingerprint"]
        == (json.loads((plain / "result.json").read_text())["fingerprint"])
    )


def test_the_first_step_and_each_that_divides_are_recorded(runs: tuple[Path, Path, str, str]) -> None:
    found = records(runs[1])
    assert [one["step"] for one in found] == [1, 2, 4]
    assert [*found[0]] == ["step", "gradients", "activations", "weights"]
    assert [*found[0]["gradients"]] == [*found[0]["weights"]]
    assert sorted(path.name for path in (runs[1] / "plots").iterdir()) == (
        ["activations.png", "gradients.png", "weights.png"]
    )


def test_tensorboard_shows_each_layer_at_each_recorded_step(runs: tuple[Path, Path, str, str]) -> None:
    events = EventAccumulator(str(runs[1] / "tensorboard" / "histograms"), size_guidance={"histograms": 0})
    events.Reload()
    names = {f"{kind}/{name}" for kind in ("gradients", "weights") for name in records(runs[1])[0][kind]}
    tags = set(events.Tags()["histograms"])
    assert names < tags
    assert any(tag.startswith("activations/") for tag in tags)
    assert [one.step for one in events.Histograms(min(names))] == [1, 2, 4]


@pytest.mark.usefixtures("undrawn")
def test_the_gradient_is_the_one_of_the_update_whatever_the_shards(
    runs: tuple[Path, Path, str, str], tmp_path: Path
) -> None:
    train(tmp_path / "run", *EACH, "batch.micro_size=8")
    whole, cut = records(runs[1])[0], records(tmp_path / "run")[0]
    for kind in ("gradients", "activations"):
        for name, one in whole[kind].items():
            assert cut[kind][name]["rms"] == pytest.approx(one["rms"], rel=1e-4)  # fp32 sums in another order


@pytest.mark.usefixtures("undrawn")
def test_a_loss_scale_is_divided_out(runs: tuple[Path, Path, str, str], tmp_path: Path) -> None:
    train(tmp_path / "run", *EACH, "precision=fp16_mixed")
    for name, one in records(runs[1])[0]["gradients"].items():
        scaled = records(tmp_path / "run")[0]["gradients"][name]["rms"]
        assert scaled == pytest.approx(one["rms"], rel=0.02)  # 2^-10, the step of fp16, through a few layers


@pytest.mark.usefixtures("undrawn")
@pytest.mark.slow
def test_a_resumed_run_continues_the_records(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder, *EACH, "stop_at_step=2")
    assert main(["resume", str(folder), "stop_at_step=null"]) == 0
    assert [one["step"] for one in records(folder)] == [1, 2, 4]


def test_values_are_counted_and_what_is_not_finite_apart() -> None:
    found = Distribution.of(*measure(torch.tensor([0.0, 1.0, -1.0, 4.0, float("nan"), float("inf")])))
    limits, counts = found.buckets()
    assert (found.num_finite, found.num_nonfinite, found.zero_share) == (4, 2, 0.25)
    assert (found.total, found.squares, found.low, found.high) == (4.0, 18.0, -1.0, 4.0)
    assert (limits, sum(counts)) == (sorted(limits), 4)
    assert found.quantiles((0.2, 1.0)) == [0.0, pytest.approx(4.0, rel=0.1)]


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


def test_a_step_that_is_not_recorded_has_no_hook_and_takes_nothing(tmp_path: Path) -> None:
    run, callback = run_double(tmp_path), Histograms(every_steps=10)
    run.model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    callback.run_start(run)
    listen, listener = callback.phase_listener(), callback.gradient_listener()
    for step, hooks in ((0, 1), (1, 0), (8, 0), (9, 1), (10, 0)):
        listen("data", step)
        assert (listener.wants(step), len(run.model[0]._forward_hooks)) == (bool(hooks), hooks)
        callback.step_end(run, None)  # type: ignore[arg-type] # not read
        assert not run.model[0]._forward_hooks


def test_what_backward_computes_again_counts_once(tmp_path: Path) -> None:
    run, callback = run_double(tmp_path), Histograms(every_steps=1)
    run.model = nn.Sequential(nn.Linear(2, 3))
    callback.run_start(run)
    listen = callback.phase_listener()
    for phase in ("data", "forward", "backward"):
        listen(phase, 0)
        run.model(torch.ones(5, 2))
    (found,) = callback._recorder.activations.found.values()
    assert int(found[0][:NUM_COUNTS].sum()) == 15


def test_a_step_that_is_left_out_is_not_recorded(tmp_path: Path) -> None:
    run, callback = run_double(tmp_path), Histograms(every_steps=1)
    callback.run_start(run)
    callback.phase_listener()("data", 0)
    callback.step_end(run, None)  # type: ignore[arg-type] # not read
    assert not (tmp_path / "histograms.jsonl").exists()


@pytest.mark.usefixtures("undrawn")
def test_of_many_layers_some_at_equal_distances_are_shown_and_the_number_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, callback = (
        run_double(tmp_path, step=1),
        Histograms(every_steps=1, most_layers=3, layers=("w*",), kinds=("weights",)),
    )
    weights = {f"{kind}{number}": torch.ones(2) for kind in "wb" for number in range(7)}
    callback.run_start(run)
    callback.phase_listener()("data", 0)
    callback.gradient_listener().take(0, UpdateTensors(grads={}, weights=weights, counted=None, ranks=Alone()))
    callback.step_end(run, None)  # type: ignore[arg-type] # not read
    callback._events.close()
    assert [*records(tmp_path)[0]["weights"]] == ["w0", "w3", "w6"]
    assert [one.getMessage() for one in caplog.records] == [
        "callbacks=[histograms] shows 3 of 7 of weights: callbacks.histograms.most_layers is the limit."
    ]


def test_the_output_layer_of_a_language_model_has_no_hook() -> None:
    model = Gpt(vocab_size=16, context=8, num_layers=1, num_heads=1, width=4)
    assert model.output_layer() not in observed_layers(model).values()
    assert len(observed_layers(model)) > 3


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["strategy=local_sgd"], "under one_device, device_map, mirrored and fsdp, not under LocalSgd."),
        (["compile.mode=default"], "callbacks.histograms: records no gradient with compile.mode=default."),
        (["callbacks.histograms.kinds=[]"], "callbacks.histograms.kinds=[]: is empty."),
    ],
)  # fmt: skip
def test_where_nothing_can_be_shown_the_run_is_refused_before_it_starts(
    overrides: list[str], text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        train(tmp_path / "run", "callbacks=[histograms]", *overrides)
    assert not (tmp_path / "run").exists()


@pytest.mark.long
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("strategy", ["mirrored", "fsdp"])
def test_two_ranks_count_what_one_counts(strategy: str, runs: tuple[Path, Path, str, str], tmp_path: Path) -> None:
    of_two = [f"strategy={strategy}", "strategy.replicas=2", "batch.micro_size=16"]
    shown = train(tmp_path / "run", *EACH, *of_two)
    assert shown == train(tmp_path / "plain", "callbacks=[]", *of_two)
    one, two = records(runs[1]), records(tmp_path / "run")
    assert [row["step"] for row in two] == [1, 2, 4]
    for name, found in one[0]["gradients"].items():
        assert two[0]["gradients"][name]["rms"] == pytest.approx(found["rms"], rel=1e-4)  # fp32 sums in another order
    assert two[0]["weights"] == one[0]["weights"]
