"""A proof that says yes of a broken strategy, or hides at which cut two trainings are one, is caught here alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from trainkit.cli import main
from trainkit.prove.comparing import compare
from trainkit.prove.examining import Examiner

MEANS = "_target_: tests.end_to_end.wrong.MeanOfMeans\ndevice: auto\n"
SMALL = ["recipe=null", "optimizer=sgd", "optimizer.lr=0.1", "--steps", "4"]
THREADS = ["strategy=central_storage", "strategy.compute_devices=[cpu,cpu]"]
OURS = ["--allow-package", "tests"]
ROOT = Path(__file__).resolve().parents[2]
MIRRORED = ["strategy=mirrored", "strategy.replicas=2"]
SAME = "  the same training as one_device, as a user would start them: "
CUTS = "    batch.micro_size is 32 here and 64 under one_device"
NEITHER = ", and the model and the objective neither draw random numbers nor couple the samples of a shard"
NUMBERS = "  the same numbers, both with batch.micro_size="


def prove(*arguments: str) -> int:
    return main(["prove", *arguments, *SMALL])


def with_strategy(text: str) -> list[str]:
    path = Path("conf/strategy/wrong.yaml")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return ["strategy=wrong", "--config-dir", "conf", *OURS]


@pytest.mark.slow
def test_mirrored_is_the_training_of_one_device(cwd: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert prove(*MIRRORED) == 0
    out = capfd.readouterr().out.splitlines()
    assert out[:3] == [f"{' '.join(MIRRORED)}, 2 replicas", f"{SAME}yes", f"{CUTS}{NEITHER}"]
    assert out[3].startswith(f"{NUMBERS}32: yes, equal")
    assert out[4] == "    4 steps in fp64"
    assert list(cwd.iterdir()) == []


@pytest.mark.parametrize(
    ("model", "does"),
    [
        (["model.dropout=0.2", "model.batch_norm=true"], "draws random numbers and couples the samples of a shard"),
        (["model._target_=tests.end_to_end.wrong.Mixing", *OURS], "couples the samples of a shard"),
    ],
)
@pytest.mark.slow
def test_a_model_that_draws_or_couples_is_the_same_training_at_one_cut_alone(
    cwd: Path, capfd: pytest.CaptureFixture[str], model: list[str], does: str
) -> None:
    assert prove(*THREADS, *model) == 1
    out = capfd.readouterr().out.splitlines()
    remedy = "    both are the same training with batch.micro_size=32"
    assert out[1:4] == [f"{SAME}NO", f"{CUTS}, and the model {does}", remedy]
    assert out[4].startswith(f"{NUMBERS}32: yes, equal")
    only = "only at an equal batch.micro_size (here 32)."
    assert out[-1] == f"  note: the model {does}: on another number of replicas it is the same training {only}"
    assert prove(*THREADS, *model, "batch.micro_size=32") == 0
    out = capfd.readouterr().out.splitlines()
    assert out[1:3] == [f"{SAME}yes", "    both have batch.micro_size=32, and no other maths key differs"]
    assert prove(*THREADS, *model, "--same-cut") == 0
    assert capfd.readouterr().out.splitlines()[1].startswith(f"{NUMBERS}32: yes, equal")


@pytest.mark.slow
def test_a_mean_of_means_is_named_with_its_first_step_and_parameter(
    cwd: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert prove(*with_strategy(MEANS), "batch.micro_size=10") == 1
    out = capfd.readouterr().out.splitlines()
    assert out[0] == "strategy=wrong, 1 replica"
    assert out[1:4] == [
        f"{SAME}yes",
        "    both have batch.micro_size=10, and no other maths key differs",
        f"{NUMBERS}10: NO",
    ]
    assert out[5].startswith("    first after step 1: param/layers.0.weight, relative error ")
    assert out[6].startswith("    explained by: rule 3 (gradient): the mean of the shards' means; gradient/layers.")
    assert out[6].endswith("(docs/numbers.md#3-gradient)")


@pytest.mark.slow
def test_local_sgd_is_said_to_be_another_training_even_where_its_numbers_are_the_same(
    cwd: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert prove("strategy=local_sgd", "strategy.replicas=2", "strategy.average_every=1,3") == 1
    out = capfd.readouterr().out.splitlines()
    another = [f"{SAME}NO", "    this strategy is a different training from that of one_device"]
    assert out[1:4] == [*another, f"{NUMBERS}32: yes, equal up to rounding"]
    second = out.index("strategy=local_sgd strategy.replicas=2 strategy.average_every=3, 2 replicas")
    assert out[second + 1 : second + 4] == [*another, f"{NUMBERS}32: NO"]
    assert out[second + 4] == "    6 steps in fp64, compared after steps 3, 6"
    assert out[second + 5].startswith("    first after step 3: param/layers.0.")


def test_a_proof_of_nothing_is_refused(cwd: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert prove("strategy=mirrored,one_device") == 2
    shown = (
        "strategy=one_device: is the reference of every proof, and comparing it with itself shows nothing. Use another"
    )
    assert shown in capfd.readouterr().err
    for name in ("mirrored", "multi_worker_mirrored", "fsdp", "tensor_parallel"):
        assert prove(f"strategy={name}", "strategy.replicas=1") == 2
        assert "strategy.replicas=1: a single rank runs the code of one_device" in capfd.readouterr().err


@pytest.mark.slow
def test_a_candidate_with_another_config_breaks_no_rule(cwd: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its updates are taken again at its own settings: a smaller clip is no clipping before the sum."""
    assert prove("strategy=device_map", "clip.max_norm=0.3,0.1") == 1
    explained = [line.strip() for line in capfd.readouterr().out.splitlines() if "explained" in line]
    assert explained == ["explained by: the config: clip.max_norm is 0.1 here and 0.3 in the reference"]


@pytest.mark.slow
def test_an_optimizer_that_cannot_step_alone_leaves_the_answer_standing(
    cwd: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        msg = "step() needs a closure"
        raise TypeError(msg)

    monkeypatch.setattr(Examiner, "replay", fails)
    assert prove("strategy=device_map", "clip.max_norm=0.3,0.1") == 1
    explained = [line.strip() for line in capfd.readouterr().out.splitlines() if "explained" in line]
    assert explained == ["not explained: an update cannot be replayed by itself (TypeError: step() needs a closure)"]


def tensors(*values: float) -> dict[int, dict[str, torch.Tensor]]:
    return {step: {"param/w": torch.tensor([value, 1.0], dtype=torch.float64)} for step, value in enumerate(values, 1)}


def verdict(found: dict[int, dict[str, torch.Tensor]], **more: Any) -> tuple[str, int | None]:
    (one,) = compare(tensors(1.0, 1.0), found, **more)
    return one.verdict, one.first_step


def test_a_verdict_is_the_size_of_the_first_difference_and_its_step() -> None:
    untouched = frozenset({"param/w"})  # without a gradient: it moves within the learning rates
    assert verdict(tensors(1.0, 1.0)) == ("equal", None)
    assert verdict(tensors(1.0, 1.0 + 1.2e-12)) == ("rounding", 2)  # of (1, 1): 8.5e-13, below 4096 units
    assert verdict(tensors(1.0 + 1.4e-12, 1.0)) == ("different", 1)  # 9.9e-13, above them
    assert verdict(tensors(1.0, 1.0 + 1e-15), exact=True) == ("different", 2)
    assert verdict(tensors(1.0 + 1e-9, 1.0), no_gradient=untouched, allowed=1e-8) == ("rounding", 1)
    assert verdict(tensors(float("nan"), 1.0)) == ("different", 1)
