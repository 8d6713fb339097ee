"""A count in the wrong bucket, a gradient before the sum of its shards or with its loss scale, and histograms that
change a weight are caught here alone.
"""

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
from trainkit.callbacks.figures.histograms import Histograms, summed
from trainkit.errors import ConfigError
from trainkit.trainer.events import Run

SHORT = ("recipe=null", "steps=4", "epochs=null", "logger=[]", "quiet=true", "seed=3", "batch.global_size=32")
EACH = ("callbacks=[histograms]", "callbacks.histograms.every_steps=2")


def train(folder: Path, *overrides: str) -> list[str]:
    """Hash of the weights, and the fingerprint."""
    result = trainkit.train([*SHORT, *overrides], run_dir=folder)
    return [result["weights_sha256"], result["fingerprint"]]


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
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with histograms, whose weights and fingerprint are those of a run without."""
    folder = tmp_path_factory.mktemp("histograms")
    assert train(folder / "shown", *EACH) == train(folder / "plain", "callbacks=[]")
    return folder / "shown"


def test_the_first_step_and_each_that_divides_are_recorded_drawn_and_shown_by_tensorboard(shown: Path) -> None:
    found = records(shown)
    assert [one["step"] for one in found] == [1, 2, 4]
    assert [*found[0]] == ["step", "gradients", "activations", "weights"]
    assert [*found[0]["gradients"]] == [*found[0]["weights"]]
    assert {path.stem for path in (shown / "plots").iterdir()} == {"activations", "gradients", "weights"}
    events = EventAccumulator(str(shown / "tensorboard/histograms"), size_guidance={"histograms": 0}).Reload()
    names = {f"{kind}/{name}" for kind in found[0] if kind != "step" for name in found[0][kind]}
    assert {*events.Tags()["histograms"]} == names
    assert [one.step for one in events.Histograms(min(names))] == [1, 2, 4]


@pytest.mark.usefixtures("undrawn")
def test_the_gradient_is_the_one_of_the_update_whatever_the_shards_and_the_loss_scale(
    shown: Path, tmp_path: Path
) -> None:
    train(tmp_path / "run", *EACH, "batch.micro_size=8", "precision=fp16_mixed")
    whole, cut = records(shown)[0], records(tmp_path / "run")[0]
    for kind in ("gradients", "activations"):
        for name, one in whole[kind].items():
            assert cut[kind][name]["rms"] == pytest.approx(one["rms"], rel=0.02)  # 2^-10, the step of fp16, a few times


def test_a_resumed_run_drops_the_records_of_steps_that_it_trains_again(tmp_path: Path) -> None:
    (tmp_path / "histograms.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 4)))
    Histograms().run_start(run_double(tmp_path, step=2))
    assert [one["step"] for one in records(tmp_path)] == [1, 2]


def test_values_are_counted_in_the_bucket_that_holds_them_and_what_is_not_finite_apart() -> None:
    values = torch.tensor([0.0, 1.0, -1.0, -3.0, 4.0, float("nan"), float("inf")])
    found = Distribution.of(*measure(values))
    assert (found.num_finite, found.num_nonfinite, found.zero_share) == (5, 2, 0.2)
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
    (found,) = callback._recorder.activations.found.values()
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
        train(tmp_path / "run", "callbacks=[histograms]", override)
    assert not (tmp_path / "run").exists()


@pytest.mark.long
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("strategy", ["mirrored", "fsdp"])
def test_two_ranks_count_what_one_counts(strategy: str, shown: Path, tmp_path: Path) -> None:
    of_two = [f"strategy={strategy}", "strategy.replicas=2", "batch.micro_size=16"]
    assert train(tmp_path / "run", *EACH, *of_two) == train(tmp_path / "plain", "callbacks=[]", *of_two)
    one, two = records(shown), records(tmp_path / "run")
    assert [row["step"] for row in two] == [1, 2, 4]
    for name, found in one[0]["gradients"].items():
        assert two[0]["gradients"][name]["rms"] == pytest.approx(found["rms"], rel=1e-4)  # fp32 sums in another order
    assert two[0]["weights"] == one[0]["weights"]
