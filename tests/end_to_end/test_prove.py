"""`trainkit prove` says the same training of ours, and another one of a user's broken strategy."""

from pathlib import Path

import pytest
import torch

from trainkit.cli import main
from trainkit.run.diagnosis import Examiner
from trainkit.run.proof import compare

MEANS = "_target_: tests.end_to_end.wrong.MeanOfMeans\ndevice: auto\n"
SMALL = ["recipe=null", "batch.micro_size=10", "optimizer=sgd", "optimizer.lr=0.1", "--steps", "4"]


def prove(*arguments: str) -> int:
    return main(["prove", *arguments, *SMALL])


def test_mirrored_is_the_training_of_one_device(cwd: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert prove("strategy=one_device,mirrored", "strategy.replicas=2") == 0
    out = capfd.readouterr().out.splitlines()
    assert out[0] == "strategy=one_device, 1 replica, 4 steps in fp64: equal, every bit"
    assert out[2] == "  4 gradients against a plain loop's: equal to rounding"
    assert out[4].startswith("strategy=mirrored strategy.replicas=2, 2 replicas, 4 steps in fp64: equal")
    assert list(cwd.iterdir()) == []


def test_a_mean_of_means_is_named_with_its_first_step_and_parameter(
    cwd: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = cwd / "conf/strategy/mean_of_means.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(MEANS)
    assert prove("strategy=mean_of_means", "--config-dir", "conf", "--allow-package", "tests") == 1
    out = capfd.readouterr().out.splitlines()
    assert out[0] == "strategy=mean_of_means, 1 replica, 4 steps in fp64: DIFFERENT"
    assert out[1].startswith("  first after step 1: param/layers.0.weight, relative error ")
    assert out[2].startswith("  explained by: rule 3 (gradient): the mean of the shards' means; gradient/layers.")
    assert out[2].endswith("(docs/numbers.md#3-gradient)")


def test_local_sgd_is_said_to_be_another_training_unless_every_step_is_averaged(
    cwd: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    alike = ("strategy=local_sgd", "strategy.replicas=2", "strategy.average_every=1")
    assert prove(*alike) == 0
    out = capfd.readouterr().out.splitlines()
    assert out[0] == f"{' '.join(alike)}, 2 replicas, 4 steps in fp64: equal to rounding"
    assert out[1] == "  this strategy is another training than that of one device, and says so"
    assert prove("strategy=local_sgd", "strategy.average_every=3") == 1
    out = capfd.readouterr().out.splitlines()
    assert out[0] == "strategy=local_sgd strategy.average_every=3, 2 replicas, 6 steps in fp64: DIFFERENT"
    assert out[1].endswith("and says so, compared after steps 3, 6")
    assert out[2].startswith("  first after step 3: param/layers.0.")


def test_a_candidate_with_another_config_breaks_no_rule(cwd: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its updates are taken again at its own settings: a smaller clip is no clipping before the sum."""
    assert prove("strategy=device_map", "clip.max_norm=0.3,0.1") == 1
    explained = [line.strip() for line in capfd.readouterr().out.splitlines() if "explained" in line]
    assert explained == ["explained by: the config: clip.max_norm is 0.1 here and 0.3 in the reference"]


def test_an_optimizer_that_cannot_step_alone_leaves_the_answer_standing(
    cwd: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        msg = "step() needs a closure"
        raise TypeError(msg)

    monkeypatch.setattr(Examiner, "replay", fails)
    assert prove("strategy=device_map", "clip.max_norm=0.3,0.1") == 1
    explained = [line.strip() for line in capfd.readouterr().out.splitlines() if "explained" in line]
    assert explained == ["not explained: an update cannot be taken again alone (TypeError: step() needs a closure)"]


def tensors(*values: float) -> dict[int, dict[str, torch.Tensor]]:
    return {step: {"param/w": torch.tensor([value, 1.0], dtype=torch.float64)} for step, value in enumerate(values, 1)}


def verdict(found: dict[int, dict[str, torch.Tensor]], **more: object) -> tuple[str, int | None]:
    (one,) = compare(tensors(1.0, 1.0), found, **more)
    return one.verdict, one.first_step


def test_the_same_bits_are_equal() -> None:
    assert verdict(tensors(1.0, 1.0)) == ("equal", None)


def test_a_few_units_in_the_last_place_are_rounding() -> None:
    assert verdict(tensors(1.0, 1.0 + 1e-13)) == ("rounding", 2)


def test_more_than_rounding_is_a_difference_since_its_first_step() -> None:
    assert verdict(tensors(1.0 + 1e-9, 1.0)) == ("different", 1)


def test_a_parameter_without_gradient_is_held_to_the_learning_rates() -> None:
    assert verdict(tensors(1.0 + 1e-9, 1.0), no_gradient=frozenset({"param/w"}), allowed=1e-8) == ("rounding", 1)


def test_nan_is_never_equal_to_rounding() -> None:
    assert verdict(tensors(float("nan"), 1.0)) == ("different", 1)
