"""A user's own data, in whole runs: the same training on every layout, and as it was without the hooks of `data`.

A collate, transform or weight of samples of a user that draws otherwise with another layout or after a resume is caught
here alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.contract.running import run, weights
from tests.support import reference, zoo
from trainkit.errors import ConfigError, DataError

FIXED = ("model=net", "batch.global_size=16", "batch.micro_size=5", "optimizer=sgd", "epochs=2")
OWN = "tests.support.own_data"


def own(name: str) -> tuple[str, str]:
    return "data=own", f"data._target_={OWN}.{name}"


@pytest.mark.parametrize(("dataset", "workers"), [("NamedPoints", 0), ("ScannedPoints", 2)])
@pytest.mark.slow
def test_fields_of_any_names_train_as_a_pair_does(tmp_path: Path, dataset: str, workers: int) -> None:
    plain = run(tmp_path / "a", *FIXED, "data=points")
    fields = ("objective.input=voxels", "objective.target=diagnosis", f"loader.num_workers={workers}")
    named = run(tmp_path / "b", *FIXED, *own(dataset), *fields)
    assert named["weights_sha256"] == plain["weights_sha256"]
    assert named["metrics"] == plain["metrics"]


def test_fields_that_are_not_known_are_refused_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has the fields voxels, site, diagnosis, and none is known as the input"):
        run(tmp_path / "a", *FIXED, *own("NamedPoints"))
    with pytest.raises(ConfigError, match=r"objective\.target=grade: there is no such field: a sample has voxels, "):
        run(tmp_path / "a", *FIXED, *own("NamedPoints"), "objective.input=voxels", "objective.target=grade")
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [(), ("strategy=mirrored", "strategy.replicas=2")], ids=["one", "mirrored"])
def test_each_split_is_evaluated_under_its_name(
    tmp_path: Path, strategy: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    result = run(tmp_path / "a", *FIXED, *own("SplitPoints"), "eval.metric=val_ood/accuracy", *strategy)
    found, plain = result["metrics"], run(tmp_path / "b", *FIXED, "data=points")["metrics"]
    kinds = ("val", "val_ood", "test", "test_new")
    assert sorted(found) == sorted(f"{split}/{name}" for split in kinds for name in ("accuracy", "loss"))
    assert found["val/loss"] == found["test/loss"] == pytest.approx(plain["val/loss"], rel=1e-12)
    assert found["val_ood/loss"] != found["val/loss"]
    assert "the split calibration is not evaluated" in capfd.readouterr().out
    assert [row["val_ood/loss"] for row in rows(tmp_path / "a") if "val_ood/loss" in row] != []


def test_a_monitored_metric_of_a_split_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval\.metric=val_far/loss: the data has the validation splits val, val"):
        run(tmp_path / "a", *FIXED, *own("SplitPoints"), "eval.metric=val_far/loss")


@pytest.mark.slow
def test_an_iterable_dataset_with_a_length_is_a_stream(tmp_path: Path) -> None:
    stream = run(tmp_path / "a", *FIXED, "data=stream_of_points")
    found = run(tmp_path / "b", *FIXED, *own("PointStream"))
    assert found["weights_sha256"] == stream["weights_sha256"]
    assert "val/loss" in found["metrics"]


@pytest.mark.slow
def test_datasets_of_any_classes_become_splits(tmp_path: Path) -> None:
    point = "{_target_: tests.support.zoo.Points, split: %s}"
    splits = ("data=splits", f"data.train={point % 'train'}", f"data.others={{val_far: {point % 'val'}}}")
    found = run(tmp_path / "a", *FIXED, *splits, "eval.metric=val_far/loss")
    plain = run(tmp_path / "b", *FIXED, "data=points")
    assert found["weights_sha256"] == plain["weights_sha256"]
    assert found["metrics"]["val_far/loss"] == plain["metrics"]["val/loss"]


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


SENTENCES = ("model=attention", "objective=language_modelling", "optimizer=sgd", "batch.global_size=8",
             "batch.micro_size=3", "steps=8", "schedule=constant", "optimizer.lr=0.2")  # fmt: skip
RAGGED = (*SENTENCES, *own("RaggedSentences"))
ONE = ("strategy=one_device",)
MIRRORED = ("strategy=mirrored", "strategy.replicas=2")
FSDP = ("strategy=fsdp", "strategy.replicas=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "workers"), [(ONE, 0), (ONE, 2), (MIRRORED, 2), (FSDP, 0)], ids=["one", "workers", "mirrored", "fsdp"]
)
def test_padded_sequences_train_by_their_tokens_on_every_layout(
    tmp_path: Path, strategy: tuple[str, ...], workers: int
) -> None:
    settings = (*RAGGED, f"data.collate={OWN}.pad", f"loader.num_workers={workers}", *strategy)
    first = run(tmp_path / "a", *settings, "stop_at_step=5")  # in the second epoch
    assert first["steps"] == 5
    result = run(tmp_path / "a", *settings, "resume=auto")
    data, held_out = zoo.Sentences(), run(tmp_path / "b", *SENTENCES, "data=sentences")
    expected = reference.train(
        zoo.Attention(), [data[index] for index in range(29)], zoo.tokens_sum, optimizer=reference.sgd(),
        rate=lambda _: 0.2, num_steps=8, global_size=8, seed=3,
    )  # fmt: skip
    assert reference.differences(weights(result), expected) == []
    assert result["metrics"]["val/loss"] == pytest.approx(held_out["metrics"]["val/loss"], rel=1e-12)


@pytest.mark.slow
def test_what_a_collate_draws_is_keyed_by_the_shard(tmp_path: Path) -> None:
    settings = (*RAGGED, f"data.collate={{_target_: {OWN}.hide_words, share: 0.3}}")
    alone = run(tmp_path / "a", *settings)
    spread = run(tmp_path / "b", *settings, *MIRRORED, "loader.num_workers=2", "stop_at_step=5")
    assert spread["steps"] == 5
    spread = run(tmp_path / "b", *settings, *MIRRORED, "loader.num_workers=2", "resume=auto")
    one, other = weights(alone), weights(spread)
    assert all(torch.allclose(one[name], other[name], rtol=1e-11, atol=1e-13) for name in one)
    assert spread["metrics"]["val/loss"] == pytest.approx(alone["metrics"]["val/loss"], rel=1e-11)
    plain = weights(run(tmp_path / "c", *RAGGED, f"data.collate={OWN}.pad"))
    assert not all(torch.allclose(one[name], plain[name]) for name in one)


def test_bad_collates_and_ragged_samples_end_with_the_key_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\(\d,\)\) differs from .* need a collate: data\.collate=PACKAGE\.FUNCTION"):
        run(tmp_path / "a", *RAGGED)
    with pytest.raises(DataError, match=r"^data\.collate=tests\.support\.own_data\.drop_one makes \(int64 \(1, 1\), "):
        run(tmp_path / "b", *RAGGED, f"data.collate={OWN}.drop_one")
    with pytest.raises(ConfigError, match=r"loader\.cache=true: data\.collate makes its batches of single samples"):
        run(tmp_path / "c", *RAGGED, f"data.collate={OWN}.pad", "loader.cache=true")
    assert not (tmp_path / "c").exists()
    with pytest.raises(ConfigError, match=r"data\.collate=os\.listdir: os is not among the packages"):
        run(tmp_path / "d", *RAGGED, "data.collate=os.listdir")


@pytest.mark.parametrize("strategy", [MIRRORED, pytest.param(FSDP, marks=pytest.mark.matrix)], ids=["mirrored", "fsdp"])
@pytest.mark.slow
def test_a_batch_transform_draws_alike_on_every_layout_and_after_a_resume(
    tmp_path: Path, strategy: tuple[str, ...]
) -> None:
    mixup = "{_target_: trainkit.data.MixUp, num_classes: 3, alpha: 1.0}"
    settings = (*FIXED, f"data.batch_transform={mixup}")
    alone = run(tmp_path / "a", *settings, "data=points")
    fields = ("objective.input=voxels", "objective.target=diagnosis", "loader.num_workers=2", *strategy)
    named = mixup.replace("}", ", input: voxels, target: diagnosis}")
    other = (*FIXED, *own("NamedPoints"), f"data.batch_transform={named}", *fields)
    assert run(tmp_path / "b", *other, "stop_at_step=4")["steps"] == 4
    spread = weights(run(tmp_path / "b", *other, "resume=auto"))
    assert all(torch.allclose(tensor, spread[name], rtol=1e-11, atol=1e-13) for name, tensor in weights(alone).items())
    plain = weights(run(tmp_path / "c", *FIXED, "data=points"))
    assert not all(torch.allclose(tensor, plain[name]) for name, tensor in weights(alone).items())


@pytest.mark.slow
def test_weighted_samples_are_the_same_on_every_layout_and_the_summary_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = (*FIXED, f"data.sampler={OWN}.weights")
    alone = run(tmp_path / "a", *settings, "data=points")
    assert "drawn by tests.support.own_data.weights: an epoch does not contain every sample" in capfd.readouterr().out
    fields = ("objective.input=voxels", "objective.target=diagnosis", "loader.num_workers=2", *MIRRORED)
    assert run(tmp_path / "b", *settings, *own("NamedPoints"), *fields, "stop_at_step=4")["steps"] == 4
    spread = weights(run(tmp_path / "b", *settings, *own("NamedPoints"), *fields, "resume=auto"))
    assert all(torch.allclose(tensor, spread[name], rtol=1e-11, atol=1e-13) for name, tensor in weights(alone).items())
    with pytest.raises(ConfigError, match=r"loader\.shuffle=false: has no effect: data\.sampler draws"):
        run(tmp_path / "c", *settings, "data=points", "loader.shuffle=false")
    with pytest.raises(ConfigError, match=r"data\.sampler=.*weights: an iterable dataset has its own order"):
        run(tmp_path / "d", *settings, "data=stream_of_points")
