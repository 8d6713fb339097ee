"""Whole runs against the oracle: config, data, loop and checkpoint together.

A run whose config, data order, evaluation or log differs from the loop by hand although each step is right is caught
here alone.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.running import run, weights
from tests.support import reference, zoo
from trainkit.errors import ConfigError
from trainkit.trainer.checkpoint.tensors import load

POINTS = ("model=net", "data=points", "batch.global_size=16", "batch.micro_size=5")


def points_oracle(**settings: Any) -> reference.Trained:
    data = zoo.Points()
    known: dict[str, Any] = {"model": zoo.Net(), "optimizer": reference.sgd(), "rate": lambda _: 0.1, "num_steps": 9}
    samples = [data[index] for index in range(37)]
    return reference.train(samples=samples, loss_sum=zoo.classes_sum, global_size=16, seed=3, **(known | settings))


def read(folder: Path) -> list[int]:
    """Every training index that a process of the run read, in order."""
    return [int(line) for path in sorted(folder.glob("read_*")) for line in path.read_text().split()]


@pytest.mark.slow
def test_a_run_with_everything_on_is_that_of_the_reference(tmp_path: Path) -> None:
    result = run(
        tmp_path / "run", *POINTS, "optimizer=adamw", "optimizer.lr=0.01", "optimizer.weight_decay=0.1", "epochs=3",
        "lr_scaling.reference_batch=8", "warmup.steps=3", "schedule=linear", "clip.max_norm=0.05",
    )  # fmt: skip
    climb, fall = [0.02 / 3, 0.04 / 3, 0.02], [0.02 * (1 - step / 6) for step in range(6)]
    expected = points_oracle(
        optimizer=reference.adamw(weight_decay=0.1, no_decay=lambda name: name.endswith("bias")),
        rate=(climb + fall).__getitem__,
        max_norm=0.05,
    )
    assert result["steps"] == 9
    assert reference.differences(weights(result), expected) == []


@pytest.mark.slow
def test_samples_read_one_at_a_time_give_the_bits_of_those_in_memory(tmp_path: Path) -> None:
    fixed = ("model=net", "batch.global_size=16", "batch.micro_size=5", "optimizer=sgd", "epochs=3")
    in_memory = run(tmp_path / "a", *fixed, "data=points")
    one_by_one = run(tmp_path / "b", *fixed, "data=recorded", f"data.folder={tmp_path}")
    assert one_by_one["weights_sha256"] == in_memory["weights_sha256"]
    assert one_by_one["metrics"]["val/loss"] == in_memory["metrics"]["val/loss"]
    orders = [reference.order(37, seed=3, epoch=epoch) for epoch in range(3)]
    assert read(tmp_path)[-111:] == [index for order in orders for index in order]


@pytest.mark.slow
def test_a_run_continued_in_the_middle_of_an_epoch_reads_on_and_ends_in_the_same_bits(tmp_path: Path) -> None:
    fixed = ("model=net", "model.norm=true", "model.dropout=0.2", "batch.global_size=16", "batch.micro_size=5",
             "optimizer=adamw", "epochs=3", "data=recorded")  # fmt: skip
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = run(tmp_path / "a", *fixed, f"data.folder={tmp_path / 'whole'}")
    parts = (*fixed, f"data.folder={tmp_path / 'parts'}")
    first = run(tmp_path / "b", *parts, "stop_at_step=4")
    assert (first["status"], first["steps"]) == ("stopped", 4)
    second = run(tmp_path / "b", *parts, "resume=auto")
    assert second["weights_sha256"] == whole["weights_sha256"]
    orders = [index for epoch in range(3) for index in reference.order(37, seed=3, epoch=epoch)]
    # four steps: an epoch of 37 and a batch of 16
    assert read(tmp_path / "parts")[-58:] == orders[-58:]


@pytest.mark.slow
def test_evaluation_counts_every_sample_once_whatever_its_batches(tmp_path: Path) -> None:
    fixed = (*POINTS, "optimizer=sgd", "steps=3", "schedule=constant", "optimizer.lr=0.1")
    data, model = zoo.Points("val"), points_oracle(num_steps=3).model
    with torch.no_grad():
        outputs = model(data.inputs.double())
    expected = float(torch.nn.functional.cross_entropy(outputs, data.targets))
    for batch_size in (4, 11, 256):
        metrics = run(tmp_path / f"{batch_size}", *fixed, f"eval.batch_size={batch_size}")["metrics"]
        assert metrics["val/loss"] == pytest.approx(expected, rel=1e-12)
        assert metrics["val/accuracy"] == int((outputs.argmax(1) == data.targets).sum()) / 11


def test_evaluation_draws_no_dropout_and_leaves_batch_statistics_alone(tmp_path: Path) -> None:
    model = ("model=net", "model.dropout=0.5", "model.norm=true")
    done = run(tmp_path, *POINTS[1:], *model, "optimizer=sgd", "optimizer.lr=1e-300", "steps=3", "eval.every_steps=1")
    expected = points_oracle(model=zoo.Net(norm=True), rate=lambda _: 0.0, num_steps=3, micro_size=5).model.eval()
    data = zoo.Points("val")
    with torch.no_grad():
        loss = float(torch.nn.functional.cross_entropy(expected(data.inputs.double()), data.targets))
    assert done["metrics"]["val/loss"] == pytest.approx(loss, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_is_trained_in_training_mode_from_the_first_step(frozen: bool, tmp_path: Path) -> None:
    model = ("model=null", "model._target_=tests.support.zoo.Modes", f"model.frozen={str(frozen).lower()}")
    done = run(tmp_path, *POINTS[1:], *model, "optimizer=sgd", "optimizer.lr=0.1", "schedule=constant", "steps=3",
               "eval.every_steps=2", "average=swa", "eval.batch_size=16")  # fmt: skip
    expected = points_oracle(model=zoo.Modes(frozen=frozen), num_steps=3, micro_size=5)
    assert reference.differences(weights(done), expected) == []
    counted = load(Path(done["last"])).tensors["optimizer/average/1.running_mean"]
    assert bool((counted == 0.5).all()) is frozen  # frozen statistics are not counted again


def test_synchronised_batch_statistics_are_refused_for_several_copies(tmp_path: Path) -> None:
    model = "model={_target_: torch.nn.SyncBatchNorm, num_features: 6}"
    with pytest.raises(ConfigError, match=r"is a SyncBatchNorm, and batch statistics are those of a shard on any"):
        run(tmp_path, model, *POINTS[1:], "strategy=mirrored", "strategy.replicas=2")


@pytest.mark.parametrize(
    ("place", "of_layer"),
    [("strategy=fsdp", False), ("strategy=parameter_server", False), ("compile.mode=default", False),
     ("strategy=pipeline", True)],
)  # fmt: skip
def test_a_hook_on_a_gradient_that_a_run_does_not_call_is_refused(place: str, of_layer: bool, tmp_path: Path) -> None:
    model = ("model=null", "model._target_=tests.support.zoo.Hooked", f"model.of_layer={str(of_layer).lower()}")
    with pytest.raises(ConfigError, match=r"model: (0.weight|2) has a (hook on its gradient|backward hook), which"):
        run(tmp_path, *model, *POINTS[1:], place)


@pytest.mark.slow
@pytest.mark.parametrize("place", [("strategy=mirrored", "strategy.replicas=2"), ("strategy=central_storage",)])
def test_a_weight_that_a_forward_pass_changes_is_refused_for_several_copies(
    place: tuple[str, ...], tmp_path: Path
) -> None:
    model = "model={_target_: torch.nn.Embedding, num_embeddings: 11, embedding_dim: 11, max_norm: 1.0}"
    fixed = (model, "data=sentences", "objective=language_modelling", "optimizer=sgd", "batch.global_size=8", "steps=1")
    assert run(tmp_path / "one", *fixed)["steps"] == 1
    with pytest.raises(ConfigError, match=r"model: Embedding\(11, 11, max_norm=1.0\) changes its weight"):
        run(tmp_path / "run", *fixed, *place)


@pytest.mark.slow
def test_augmentation_is_keyed_by_epoch_and_sample(tmp_path: Path) -> None:
    fixed = ("model=net", "data=noisy", f"data.folder={tmp_path}", "optimizer=sgd", "epochs=2", "batch.micro_size=5")
    run(tmp_path / "a", *fixed, "batch.global_size=16")
    first = noise_of_two_epochs(tmp_path)
    run(tmp_path / "b", *fixed, "batch.global_size=10")
    assert noise_of_two_epochs(tmp_path) == first
    assert len(set(first[0].values()) | set(first[1].values())) == 2 * 37


def noise_of_two_epochs(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Sample -> the noise it got, for each of the last two epochs that were read."""
    lines = [line.split() for path in folder.glob("noise_*") for line in path.read_text().splitlines()][-74:]
    return dict(lines[:37]), dict(lines[37:])


def test_the_logged_loss_is_that_of_the_whole_step(tmp_path: Path) -> None:
    import json

    run(tmp_path, *POINTS, "optimizer=sgd", "steps=3", "schedule=constant", "optimizer.lr=0.1", "log_every_steps=1",
        "eval.every_epochs=null")  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert losses == pytest.approx(points_oracle(num_steps=3).losses, rel=1e-12)
