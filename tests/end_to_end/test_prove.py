"""A proof that says yes of a broken strategy, or hides at which cut two trainings are one, is caught here alone."""

from pathlib import Path

import pytest

from trainkit.cli import main
from trainkit.prove.examining import Examiner

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


@pytest.mark.slow
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
