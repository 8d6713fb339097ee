"""Splits: folds, samplers, what a class declares, and evaluations; a plan knows a split without opening the data.

A fold that trains on what it is validated on, a part with other samples than the whole, a sampler that draws in other
shares than samples weigh, a random generator inside a dataset, and an evaluation that counts a sample twice or never
are caught here alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from tests.data.samples import CPU, PATHS, InMemorySquares, Noisy, Squares, make_loader
from tests.support.present import present
from trainkit.cli import main
from trainkit.config.sections import CvConfig
from trainkit.config.sections import LoaderConfig as LoaderSettings
from trainkit.data import splits
from trainkit.data.hooks import DataHooks, Reading, UserCollate, UserSampler, WeightedOrder
from trainkit.data.reading.iterable import Stream
from trainkit.data.reading.loader import EvalBatches, num_eval_batches
from trainkit.data.samplers import BalancedClasses, WeightsOf
from trainkit.data.sets.images import Digits
from trainkit.data.sets.synthetic import Synthetic, SyntheticTokens
from trainkit.data.splits import (
    Subset,
    build_splits,
    declared_data,
    fold_of_each,
    folded,
    keep_splits,
    labels_of,
    remarks,
    splits_of,
)
from trainkit.errors import ConfigError, DataError
from trainkit.numerics.batch import Ticket
from trainkit.numerics.precision import Precision
from trainkit.objectives.regression import Regression
from trainkit.strategies.base import LocalModel
from trainkit.strategies.collectives import LocalCollective
from trainkit.trainer.evaluate import evaluate

HERE = "tests.data.test_splits"


class Read:
    """Squares that are read one by one."""

    classes = ("even", "odd")

    def __init__(self, count: int) -> None:
        self.targets = [number % 2 for number in range(count)]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(index**2)]), self.targets[index]


class Gathered(Read):
    def gather(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return indices.float().unsqueeze(1) ** 2, indices % 2


def test_every_sample_is_held_out_once_and_trained_on_in_the_other_folds() -> None:
    folds = [folded({"train": Read(11)}, CvConfig(folds=3, fold=fold)) for fold in range(3)]
    held_out = [[int(inputs**0.5) for inputs, _ in parts["val"]] for parts in folds]
    assert sorted(index for fold in held_out for index in fold) == list(range(11))
    for parts, out in zip(folds, held_out, strict=True):
        assert sorted(int(inputs**0.5) for inputs, _ in parts["train"]) == sorted(set(range(11)) - set(out))
    assert sorted(map(len, held_out)) == [3, 4, 4]


def test_classes_are_spread_evenly_over_the_folds_of_any_run() -> None:
    labels = Digits(split="train").tensors()[1].numpy()
    folds = fold_of_each(len(labels), 5, seed=0, labels=labels)
    counts = np.stack([np.bincount(labels[folds == fold], minlength=10) for fold in range(5)])
    assert np.ptp(counts, axis=0).max() == np.ptp(counts.sum(1)) == 1
    assert fold_of_each(50, 5, seed=0).tolist()[:10] == [3, 2, 3, 2, 4, 0, 2, 2, 0, 3]
    assert fold_of_each(50, 5, seed=0).tolist() != fold_of_each(50, 5, seed=1).tolist()


@pytest.mark.parametrize(
    "dataset",
    [Read(7), Gathered(7), Synthetic(split="train", num_samples=7, num_classes=3), SyntheticTokens(split="train")],
)
def test_a_part_gives_the_samples_of_the_whole_however_it_is_read(dataset: Any) -> None:
    indices = np.array([5, 1, 2])
    part: Any = Subset(dataset, indices)
    assert len(part) == 3
    expected = [dataset[int(index)] for index in indices]
    for method in ("tensors", "gather"):
        assert hasattr(part, method) == hasattr(dataset, method)
        if hasattr(part, method):
            batch = part.tensors() if method == "tensors" else part.gather(torch.arange(3))
            for row, sample in enumerate(expected):
                assert all(torch.equal(x[row], torch.as_tensor(y)) for x, y in zip(batch, sample, strict=True))
    for row, sample in enumerate(expected):
        assert all(torch.equal(*map(torch.as_tensor, pair)) for pair in zip(part[row], sample, strict=True))


def test_classes_are_known_where_the_dataset_tells_them_without_being_read() -> None:
    assert present(labels_of(Read(4))).tolist() == [0, 1, 0, 1]
    assert present(labels_of(Synthetic(split="train", num_samples=4, num_classes=3))).tolist() == [0, 1, 2, 0]
    assert labels_of(SyntheticTokens(split="train")) is None
    assert Subset(Read(7), np.array([5])).classes == ("even", "odd")


def test_the_validation_split_is_set_aside_and_the_test_split_stays() -> None:
    datasets = {"train": Read(6), "val": Read(2), "test": Read(3)}
    parts = folded(datasets, CvConfig(folds=2, fold=1))
    assert {name: len(part) for name, part in parts.items()} == {"train": 3, "val": 3, "test": 3}
    assert folded(datasets, CvConfig()) is datasets


@pytest.mark.parametrize(
    ("train", "text"),
    [(Read(4), "more than the 4"), (Stream(source=[1], num_samples=1), "Stream is read")],
)
def test_what_has_no_folds_is_refused(train: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=f"cv.folds=5: {text}"):
        folded({"train": train}, CvConfig(folds=5))


class Split(Read):
    def __init__(self, split: str) -> None:
        super().__init__(3)
        self.split = split


class Three(Split):
    splits = ("train", "val", "test")


class Empty(Split):
    def __len__(self) -> int:
        return 3 if self.split == "train" else 0


class Endless:
    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(())


def test_a_class_says_by_its_signature_or_by_name_which_splits_it_has() -> None:
    assert splits_of({"_target_": f"{HERE}.Endless"}) == ("train",)
    assert splits_of({"_target_": f"{HERE}.Split"}) == ("train", "val")
    parts = build_splits({"_target_": f"{HERE}.Three"})
    assert {name: part.split for name, part in parts.items()} == {"train": "train", "val": "val", "test": "test"}


def test_an_empty_split_is_named_and_an_iterable_dataset_shown_the_way() -> None:
    with pytest.raises(DataError, match=r"^the val split of tests\.data\.test_splits\.Empty is empty"):
        build_splits({"_target_": f"{HERE}.Empty"})
    with pytest.raises(DataError, match=r"^Endless has no length, .* data=stream data\.source\._target_="):
        build_splits({"_target_": f"{HERE}.Endless"})


def test_jobs_share_the_tensors_of_a_dataset_that_is_kept_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "_CACHED", {})
    digits = {"_target_": "trainkit.data.Digits", "scaling": "unit"}
    assert keep_splits(digits)
    assert build_splits(digits)["val"].tensors()[0] is build_splits(dict(reversed(digits.items())))["val"].tensors()[0]
    other = {**digits, "scaling": "standard"}
    assert build_splits(other)["val"].tensors()[0] is not build_splits(other)["val"].tensors()[0]
    assert not keep_splits({"_target_": f"{HERE}.Three"})


def drawn_by(weights: Any) -> DataHooks:
    return DataHooks(sampler=UserSampler(function=lambda _: weights, name="mine.weights"))


def test_any_stretch_of_the_order_is_that_of_the_whole_and_epochs_differ() -> None:
    order = WeightedOrder(cumulative=np.cumsum(np.arange(50.0)), seed=3)
    whole = order.indices(1, 0, 200)
    assert np.array_equal(whole[37:90], order.indices(1, 37, 90))
    assert not np.array_equal(whole, order.indices(2, 0, 200))
    assert whole.min() > 0  # the first sample has no weight


def test_samples_come_as_often_as_they_weigh() -> None:
    order = WeightedOrder(cumulative=np.cumsum([1.0, 0.0, 2.0, 1.0]), seed=0)
    shares = np.bincount(order.indices(0, 0, 40_000)) / 40_000
    assert np.allclose(shares, [0.25, 0, 0.5, 0.25], atol=0.01)  # five standard deviations


def test_a_sample_that_is_drawn_twice_in_an_epoch_is_augmented_twice() -> None:
    hooks = drawn_by(np.arange(8) == 3)
    batches = make_loader(Noisy(8), hooks=hooks).fetch(Ticket(0, (0, 1)))
    noise = torch.cat([batch[0] for batch in batches]).flatten()
    assert (noise.floor() == 3).all()
    assert len(set(noise.tolist())) == 4
    by_workers = make_loader(Noisy(8), hooks=hooks, num_workers=1)
    assert torch.equal(by_workers.fetch(Ticket(0, (0, 1)))[1][0], batches[1][0])
    by_workers.close()


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        ([1.0] * 9, r"gives weights of the shape \(9,\) for 10 samples"),
        ([1.0] * 9 + [-1.0], "gives sample 9 the weight -1.0"),
        ([0.0] * 10, "gives every sample the weight 0"),
        (["many"] * 10, "fails: ValueError"),
    ],
)
def test_weights_that_are_none_are_refused(weights: list[Any], why: str) -> None:
    with pytest.raises(DataError, match=f"^data\\.sampler=mine\\.weights {why}"):
        make_loader(Squares(), hooks=drawn_by(weights))


def test_balanced_classes_weigh_alike_in_a_fold_too() -> None:
    train = folded({"train": Digits(split="train")}, CvConfig(folds=5, fold=0))["train"]
    assert np.allclose(np.bincount(train.tensors()[1].numpy(), weights=BalancedClasses()(train)), 1)
    with pytest.raises(DataError, match="BalancedClasses needs the class of each sample, and Squares"):
        BalancedClasses()(Squares())


def test_weights_may_be_an_attribute() -> None:
    dataset = Squares()
    dataset.sample_weights = [2.0] * 10  # type: ignore[attr-defined]
    assert WeightsOf()(dataset) == [2.0] * 10
    with pytest.raises(DataError, match="Squares has no attribute shares"):
        WeightsOf(attribute="shares")(dataset)


_GLOBAL, _OLD = np.random.default_rng(0), np.random.RandomState(0)


class Unkeyed(Dataset[int]):
    notes = ("3 rows are left out",)

    def __init__(self, **parts: Any) -> None:
        self.parts = parts

    def __getitem__(self, index: int) -> int:
        return index + int(_GLOBAL.integers(3))


def test_generators_that_a_dataset_and_its_functions_hold_at_any_depth_are_named() -> None:
    transforms = [partial(max, key=random.Random(0)), lambda x, r=_OLD: x]
    noisy = torch.utils.data.Subset(Unkeyed(rng=torch.Generator(), others=transforms), [0])
    hooks = DataHooks(collate=UserCollate(function=partial(sorted, key=random.Random(0)), name="x"))
    notes = [text.partition(" that no key")[0] for text in remarks([noisy, Stream(source=[1], num_samples=1)], hooks)]
    kinds = (
        "torch._C.Generator",
        "random.Random",
        "numpy.random.mtrand.RandomState",
        "numpy.random._generator.Generator",
    )
    assert {*notes} == {*(f"Subset holds a {kind}" for kind in kinds), "partial holds a random.Random"}


def test_the_generators_of_the_process_are_keyed_and_not_named() -> None:
    keyed = Unkeyed(torch=torch.default_generator, numpy=np.random.mtrand._rand, python=random.random)
    notes = remarks([keyed, keyed])
    assert [text.partition(" that no key")[0] for text in notes] == [
        "3 rows are left out", "Unkeyed holds a numpy.random._generator.Generator",
    ]  # fmt: skip


NODES: list[Mapping[str, Any]] = [
    {"_target_": "trainkit.data.Digits", "scaling": "unit"},
    {"_target_": "trainkit.data.Synthetic", "shape": [3, 8, 8], "num_samples": 20, "val_samples": 7},
    {"_target_": "trainkit.data.SyntheticTokens", "context": 9, "num_samples": 20, "val_samples": 7},
    {"_target_": "trainkit.data.Friedman", "num_samples": 20, "val_samples": 7},
    {"_target_": "trainkit.data.PythonSource", "context": 16, "max_bytes": 9000},
    {"_target_": "trainkit.data.Splits", "train": {"_target_": "trainkit.data.Digits", "split": "train"}},
]


def shapes(sample: Any) -> Any:
    return tree_map(lambda leaf: (tuple(torch.as_tensor(leaf).shape), torch.as_tensor(leaf).dtype), sample)


@pytest.mark.parametrize("node", NODES, ids=[node["_target_"].rpartition(".")[2] for node in NODES])
def test_what_a_class_declares_is_what_its_data_has(node: Mapping[str, Any]) -> None:
    real, declared = build_splits(node), declared_data(node, CvConfig())
    assert declared.splits.keys() == real.keys()
    for name, split in declared.splits.items():
        assert shapes(split[0]) == shapes(real[name][0])
        if declared.knows_length:
            assert len(split) == len(real[name])


def test_folds_of_declared_data_have_the_sizes_of_folds() -> None:
    parts = declared_data(NODES[0], CvConfig(folds=5, fold=0)).splits
    assert {name: len(part) for name, part in parts.items()} == {"train": 1149, "val": 288}


class Opens:
    """A dataset that must not be made."""

    def __init__(self) -> None:
        raise AssertionError


OWN = ("recipe=null", "data=undeclared", "--allow-package", "tests")


@pytest.fixture
def plan(cwd: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    (cwd / "conf/data").mkdir(parents=True)
    (cwd / "conf/data/undeclared.yaml").write_text("_target_: tests.data.test_splits.Opens\n")

    def planned(*arguments: str, code: int = 0) -> tuple[str, str]:
        assert main(["plan", *arguments, "--config-dir", "conf"]) == code
        printed = capsys.readouterr()
        return printed.out, printed.err

    return planned


def test_data_that_declares_nothing_is_not_opened_either(plan: Callable[..., tuple[str, str]]) -> None:
    out, _ = plan(*OWN)
    lines = [line.strip() for line in out.splitlines()]
    assert (
        "note: data: Opens does not declare its length, and no data is opened: the number of steps, and time and cost "
        "to the end, are left out. --num-samples N gives it."
    ) in lines
    assert (
        "note: data: Opens does not declare its samples, and no data is opened: activations, and the check that model "
        "and data fit, are left out. --open-data reads the data."
    ) in lines
    assert not [line for line in lines if line.startswith(("samples", "steps", "rate curve"))]
    assert json.loads(plan(*OWN, "--json", "--num-samples", "640")[0])["steps"] == 10
    with pytest.raises(AssertionError):
        plan(*OWN, "--open-data")


def test_an_unset_key_of_the_data_is_a_note(plan: Callable[..., tuple[str, str]]) -> None:
    facts = json.loads(plan("data=token_memmap", "model=gpt", "objective=language_modelling", "recipe=null", "steps=3",
        "model.vocab_size=9", "model.context=8", "model.num_layers=1", "model.num_heads=1", "model.width=8",
        "data.context=8", "--json")[0])  # fmt: skip
    assert "data.path is not set: a training needs it" in facts["notes"]
    assert facts["steps"] == 3
    assert facts["memory"]["activations"] > 0


def test_a_length_that_contradicts_the_class_is_refused(plan: Callable[..., tuple[str, str]]) -> None:
    _, err = plan("--num-samples", "5", code=2)
    rule = "Digits declares 1,437 training samples. Leave the flag out. (command line)"
    assert err.splitlines()[1:] == [f"  --num-samples=5: {rule}"]
    _, err = plan("--num-samples", "none", code=2)
    assert "--num-samples=none: must be a whole number, 1 to 1,000,000,000,000,000. (command line)" in err


def batches(dataset: Any, rank: int = 0, num_ranks: int = 1, *, together: bool = False, **settings: Any) -> EvalBatches:
    reading = Reading(device=CPU, settings=LoaderSettings(**settings))
    return EvalBatches(dataset, reading, batch_size=4, rank=rank, num_ranks=num_ranks, together=together)


@pytest.mark.parametrize(("dataset", "settings"), PATHS)
def test_each_sample_comes_exactly_once_over_all_ranks(
    dataset: type[InMemorySquares | Squares], settings: dict[str, Any]
) -> None:
    per_rank = [[targets.tolist() for _, targets in batches(dataset(10), rank, 3, **settings)] for rank in range(3)]

    assert per_rank == [[[0, 1, 4, 9]], [[16, 25, 36, 49]], [[64, 81]]]


def test_it_has_the_same_random_samples_each_time_and_a_length() -> None:
    loader = batches(Noisy(10))
    assert [x.tolist() for x, _ in loader] == [x.tolist() for x, _ in loader]
    assert len(list(loader)) == len(loader) == num_eval_batches(10, 4) == 3


@pytest.mark.parametrize(("dataset", "settings"), PATHS)
def test_what_a_model_writes_into_its_inputs_is_not_in_the_next_evaluation(
    dataset: type[InMemorySquares | Squares], settings: dict[str, Any]
) -> None:
    loader = batches(dataset(9), **settings)
    inputs = []
    for _ in range(2):
        for batch in loader:
            inputs.append(batch[0].flatten().tolist())
            batch[0].zero_()
    assert inputs[: len(inputs) // 2] == inputs[len(inputs) // 2 :] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


def test_a_rank_without_batches_gets_none() -> None:
    assert list(batches(Squares(3), rank=1, num_ranks=2, num_workers=1)) == []


def test_stopping_early_leaves_no_process() -> None:
    running = iter(batches(Squares(10), num_workers=1))
    next(running)
    assert isinstance(running, Generator)
    running.close()


@pytest.mark.parametrize(("dataset", "settings"), PATHS)
def test_ranks_that_compute_together_get_equally_many_batches_and_count_their_own(
    dataset: type[InMemorySquares | Squares], settings: dict[str, Any]
) -> None:
    ranks = [batches(dataset(6), rank, 3, together=True, **settings) for rank in range(3)]
    assert [loader.num_counted for loader in ranks] == [1, 1, 0]
    per_rank = [[targets.tolist() for _, targets in loader] for loader in ranks]
    assert per_rank == [[[0, 1, 4, 9]], [[16, 25]], [[0, 1, 4, 9]]]


def test_a_repeated_batch_is_run_and_not_counted() -> None:
    calls = []
    model = torch.nn.Linear(1, 1)
    model.register_forward_hook(lambda *_: calls.append(1))
    local = LocalModel(model=model, device=CPU, data_ranks=LocalCollective(), precision=Precision())
    once = [(torch.ones(2, 1), torch.zeros(2, 1))]
    repeated = [*once, (torch.ones(2, 1), torch.full((2, 1), 1000.0))]
    expected = evaluate(local, Regression(), once, split="val")

    assert evaluate(local, Regression(), repeated, split="val", num_counted=1) == expected
    assert len(calls) == 3
