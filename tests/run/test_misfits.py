"""A model, data and objective that do not fit, and fail only in the first step or never, are caught here alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainkit
from trainkit.cli import main
from trainkit.config.check import checked
from trainkit.config.targets.allowed import allow_packages
from trainkit.errors import ConfigError
from trainkit.run.planning.memory import meta_model
from trainkit.run.planning.misfits import refuse_misfits
from trainkit.run.planning.plan import make_plan

PACKAGE = """
import sys

import torch
from torch import nn
from torch.nn import functional
from trainkit.objectives.base import Loss, Metric, Objective
from trainkit.objectives.classification import Classification

SAMPLES = {
    "plain": lambda x, y: (x, y),
    "float64": lambda x, y: (x.double(), y),
    "high_label": lambda x, y: (x, y + 2),
    "negative_label": lambda x, y: (x, -1),
    "nothing": lambda x, y: (None, y),
    "alone": lambda x, y: x,
    "one_number": lambda x, y: (x, torch.tensor([float(y)])),
    "padded_shares": lambda x, y: (x, torch.tensor([0.5, 0.5, -100.0])),
    "two_labels": lambda x, y: (x, torch.tensor([y, y])),
    "ragged": lambda x, y: (torch.cat([x, x[:y]]), y),
}


class Data(torch.utils.data.Dataset):
    splits = ("train",)

    def __init__(self, kind: str = "plain"):
        if kind == "absent":
            raise FileNotFoundError("no such file: train.csv")
        self.kind = kind

    def __len__(self):
        return -3 if self.kind == "negative_length" else 40

    def __getitem__(self, index):
        if self.kind == "broken":
            raise KeyError("column")
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return SAMPLES.get(self.kind, SAMPLES["plain"])(x, index % 3)


class Net(nn.Module):
    def __init__(self, kind: str = "plain", width: int = 8):
        super().__init__()
        if kind == "broken":
            raise ValueError("cannot be negative")
        self.kind = kind
        self.layer = nn.LazyLinear(3) if kind == "lazy" else nn.Linear(width, 3)
        self.listed = [nn.Linear(3, 3)]
        if kind == "sparse":
            self.table = nn.Parameter(torch.zeros(3, 3))
        if kind == "complex":
            self.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.register_buffer("rows", torch.ones(4, width))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))

    def forward(self, x):
        scores = self.layer(x)
        if self.kind == "table":
            return functional.linear(self.rows, self.layer.weight)
        if self.kind == "raises":
            raise RuntimeError("a mistake of mine")
        if self.kind == "flag":
            self.seen |= True
        if self.kind == "exits":
            sys.exit(0)
        if self.kind == "noise":
            scores = functional.dropout(scores, training=self.training)
        if self.kind == "sparse":
            scores = scores + functional.embedding(scores.argmax(1), self.table, sparse=True)
        if self.kind == "in_place":
            return torch.relu_(scores.exp()).mul_(2)
        changed = {"dict": {"out": scores}, "vector": scores.sum(1), "detached": scores.detach()}
        return self.listed[0](scores) if self.kind == "listed" else changed.get(self.kind, scores)


class Closing(torch.optim.SGD):
    def step(self, closure):
        closure()


class Own(Objective):
    def __init__(self, kind: str = "plain"):
        self.kind = kind

    def loss(self, model, batch):
        x, y = batch
        each = functional.cross_entropy(model(x), y, reduction="none")
        if self.kind == "raises":
            raise ZeroDivisionError("a mistake of mine")
        if self.kind == "tensor":
            return each.sum()
        weight = 2.0 if self.kind == "weight" else float(len(y))
        return Loss(loss_sum=each if self.kind == "vector" else each.sum(), weight=weight)


class NoMetric(Metric):
    def update(self, loss, batch):
        raise ValueError("a mistake of mine")

    def compute(self, collective):
        return 0.0


class Measured(Classification):
    def metrics(self):
        return {"odd": NoMetric()}


class Boxed:
    def __init__(self, samples):
        self.x, self.y = torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])


def boxed(samples):
    return Boxed(samples)


class Unboxed(Objective):
    def loss(self, model, batch):
        return Loss(functional.cross_entropy(model(batch.x), batch.y, reduction="sum"), len(batch.y))


def number():
    return 3
"""
ARGUMENTS = ("--allow-package", "misfit_pkg", "recipe=null", "quiet=true", "steps=2", "batch.global_size=8")
OWN = ("data._target_=misfit_pkg.Data", "model._target_=misfit_pkg.Net", "callbacks=[]", "logger=[]")


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "misfit_pkg.py").write_text(PACKAGE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("misfit_pkg", None)


def data(kind: str) -> tuple[str, ...]:
    return (*OWN, f"data.kind={kind}")


def net(kind: str) -> tuple[str, ...]:
    return (*OWN, f"model.kind={kind}")


def own(kind: str) -> tuple[str, ...]:
    return (*OWN, "objective._target_=misfit_pkg.Own", f"objective.kind={kind}")


MLP = ("data._target_=misfit_pkg.Data", "callbacks=[]", "logger=[]", "model=mlp")
CASES: list[tuple[tuple[str, ...], int, *tuple[str, ...]]] = [
    (data("float64"), 3, "the model computes in float32", "float64 (8,)", "x.float()"),
    (data("high_label"), 2, "model._target_=misfit_pkg.Net", "gives 3 classes, and a target is 3. Give it 4 or more"),
    (data("negative_label"), 3, "a target among the samples 0, 10, 20 and 30 is -1", "objective.ignore_index=-1."),
    (data("nothing"), 3, "sample 0 cannot be part of a batch"),
    (data("alone"), 3, "objective.input=NAME"),
    (data("one_number"), 3, "the targets are float32", "these are (4, 3), and the targets (4, 1)"),
    (data("padded_shares"), 3, "targets of classes are floating, -100 to 0.5", "data.collate.target_padding=0"),
    (data("two_labels"), 2, "scores (4, 3) for targets (4, 2)", "the classes of (4, 3) are (4,)"),
    (data("ragged"), 3, "Samples of several sizes need a collate"),
    (data("absent"), 3, "the train split of misfit_pkg.Data cannot be made: FileNotFoundError", "train.csv"),
    (data("broken"), 3, "sample 0 of Data cannot be read: KeyError: 'column'", "in __getitem__"),
    (data("negative_length"), 3, "the length of Data is not a number of samples"),
    (net("broken"), 2, "model._target_=misfit_pkg.Net: cannot be made: ValueError: cannot be negative", "in __init__"),
    (net("raises"), 2, "RuntimeError: a mistake of mine", "in forward"),
    (net("exits"), 1, "exit with code 0 while the run was starting", "sys.exit was called in"),
    (net("dict"), 2, "the model returns a dict"),
    (net("vector"), 2, "scores (4,) for targets (4,)", "there is no dim of classes"),
    ((*net("table"), "precision=bf16"), 2, "buffers keep their dtype: rows is float32", "rows.to(x.dtype)"),
    (net("detached"), 2, "the loss does not depend on a parameter that is trained"),
    (net("flag"), 2, "updates seen, of bool, in its forward pass", "a buffer of float32 or int64"),
    (net("in_place"), 2, "modified by an inplace operation"),
    (net("lazy"), 2, "has a parameter, layer.weight, without a shape"),
    (net("complex"), 2, "has a complex parameter, turn. Keep torch.view_as_real of it"),
    ((*net("noise"), "compile.mode=step"), 2, "compile.mode=step: the model or the objective draws random numbers"),
    ((*net("sparse"), "optimizer=sgd", "compile.mode=step"), 2, "compile.mode=step: has no graph of sparse gradients"),
    ((*net("sparse"), "optimizer=adam"), 2, "does not support sparse gradients", "The gradient of table is sparse"),
    (net("listed"), 2, "a parameter of shape (3, 3) that is not among model.parameters()", "nn.ModuleList"),
    ((*OWN, "optimizer._target_=misfit_pkg.Closing"), 2, "a step with the gradients of this model raised TypeError"),
    (own("weight"), 2, "gives the weight 2 for 4 samples, and Own.weight_per_sample the weight 1 for each"),
    ((*OWN, "model.width=9"), 2, "model.width=9: the layer takes 9 features, and it gets 8. Use 8"),
    ((*MLP, "model.in_features=8", "model.out_features=2"), 2, "model.out_features=2: the model gives 2 classes"),
    ((OWN[0], "model._target_=misfit_pkg.number"), 2, "gives a int, not a torch.nn.Module"),
    (own("raises"), 2, "objective._target_=misfit_pkg.Own", "ZeroDivisionError: a mistake of mine", "in loss"),
    (own("tensor"), 2, "Own.loss returns a Tensor", "Loss(loss_sum=..., weight=...)"),
    (own("vector"), 2, "gives loss_sum of shape (4,)", "sum it"),
    ((*OWN, "objective._target_=torch.nn.CrossEntropyLoss"), 2, "is no trainkit Objective"),
    ((*OWN, "objective._target_=misfit_pkg.Measured"), 2, "raised ValueError: a mistake of mine", "in update"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[" ".join(case[0][-2:])[-60:] for case in CASES])
def test_a_misfit_is_one_screen_and_leaves_nothing_behind(
    case: tuple[tuple[str, ...], int, *tuple[str, ...]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments, code, *texts = case
    assert main([*ARGUMENTS, *arguments]) == code
    shown = capfd.readouterr().err
    for text in texts:
        assert text in shown, shown
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_as_the_config_sets_it_steps_with_sparse_gradients(momentum: float) -> None:
    assert main(["plan", *ARGUMENTS, *net("sparse"), "optimizer=sgd", f"optimizer.momentum={momentum}"]) == 0


def test_what_fits_is_not_refused_for_needing_a_larger_batch_than_the_check(tmp_path: Path) -> None:
    large = "class Large(Net):\n    def forward(self, x):\n        assert len(x) > 5\n        return self.layer(x)\n"
    (tmp_path / "misfit_pkg.py").write_text(PACKAGE + large)
    assert main(["plan", *ARGUMENTS, OWN[0], "model._target_=misfit_pkg.Large"]) == 0


def test_an_object_that_stays_in_the_memory_of_the_host_is_refused_for_a_gpu() -> None:
    keys = (*OWN, "data.collate=misfit_pkg.boxed", "objective._target_=misfit_pkg.Unboxed")
    composition = trainkit.compose([*ARGUMENTS[2:], *keys], packages=["misfit_pkg"])
    with allow_packages(["misfit_pkg"]):
        cfg = checked(composition).cfg
        on_host, on_gpu = (make_plan(cfg, num_gpus=count) for count in (0, 1))
        refuse_misfits(on_host, meta_model(on_host))
        with pytest.raises(ConfigError, match=r"data\.collate=misfit_pkg\.boxed: puts a Boxed into the batch"):
            refuse_misfits(on_gpu, meta_model(on_gpu))
