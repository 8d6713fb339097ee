"""A model, data and objective that do not fit, and fail only in the first step or never, are caught here alone.
A key of the user that has no effect and is silently ignored, or one of a recipe that is refused, is caught here.
A convolution whose gradient torch computes wrongly in bfloat16 on a CPU, and that trains, is caught here alone.
A parameter that two optimizers update, or none, is caught here alone.
A rank that trains by another plan than the one its parent resolved is caught here alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import trainkit
from tests.contract.stepping import CONF
from trainkit import api
from trainkit.cli import main
from trainkit.cluster.local import detect
from trainkit.config.check import checked
from trainkit.config.compose import compose
from trainkit.config.schema import RunConfig
from trainkit.config.targets.allowed import allow_packages
from trainkit.errors import ConfigError, DataError, Problem, TrainkitError
from trainkit.run.planning import convolutions
from trainkit.run.planning import notes as planning_notes
from trainkit.run.planning.memory import memory_of
from trainkit.run.planning.misfits import refuse_misfits
from trainkit.run.planning.notes import model_notes
from trainkit.run.planning.plan import VARIABLE, RunPlan, make_plan, plan_from_environ, plan_to_environ
from trainkit.trained.build import meta_model
from trainkit.trainer.checkpoint.tensors import load

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


def objective(kind: str) -> tuple[str, ...]:
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
    (objective("weight"), 2, "gives the weight 2 for 4 samples, and Own.weight_per_sample the weight 1 for each"),
    ((*OWN, "model.width=9"), 2, "model.width=9: the layer takes 9 features, and it gets 8. Use 8"),
    ((*MLP, "model.in_features=8", "model.out_features=2"), 2, "model.out_features=2: the model gives 2 classes"),
    ((OWN[0], "model._target_=misfit_pkg.number"), 2, "gives a int, not a torch.nn.Module"),
    (objective("raises"), 2, "objective._target_=misfit_pkg.Own", "ZeroDivisionError: a mistake of mine", "in loss"),
    (objective("tensor"), 2, "Own.loss returns a Tensor", "Loss(loss_sum=..., weight=...)"),
    (objective("vector"), 2, "gives loss_sum of shape (4,)", "sum it"),
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
        refuse_misfits(on_host, meta_model(on_host.cfg))
        with pytest.raises(ConfigError, match=r"data\.collate=misfit_pkg\.boxed: puts a Boxed into the batch"):
            refuse_misfits(on_gpu, meta_model(on_gpu.cfg))


POINTS = """\
import torch

class Points:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((64,), index / 64), index % 10
"""
ADAMW_NOTE = "optimizer.groups.no_decay holds 2 of 4 parameters: layers.0.bias, layers.2.bias"


@pytest.fixture
def notes(cwd: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Plan a run from the command line; return its notes, or its problems."""

    def plan(*arguments: str, code: int = 0) -> list[str]:
        assert main(["plan", *arguments]) == code
        printed = capsys.readouterr()
        if code:
            return [line.strip() for line in printed.err.splitlines()[1:]]
        return [line.partition("note: ")[2] for line in printed.out.splitlines() if line.startswith("  note: ")]

    return plan


@pytest.fixture
def points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The arguments of a dataset that has training samples alone."""
    (tmp_path / "test_key_notes_data.py").write_text(POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "conf/data").mkdir(parents=True)
    (tmp_path / "conf/data/points.yaml").write_text("_target_: test_key_notes_data.Points\n")
    return ("data=points", "--config-dir", str(tmp_path / "conf"), "--allow-package", "test_key_notes_data")


@pytest.mark.slow
def test_a_run_ends_inside_the_warmup_of_its_recipe(cwd: Path) -> None:
    assert main(["steps=5", "callbacks=[]", "logger=[]"]) == 0
    (run,) = cwd.glob("outputs/digits/*")
    rates = [json.loads(line).get("lr") for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rates[0] == pytest.approx(0.01 * 5 / 23), "step 5 of a warmup of 23 steps, as in the whole training"
    recorded = json.loads((run / "environment.json").read_text())["notes"]
    assert "warmup.epochs=1 is 23 steps: the run ends inside it, at step 5 the rate is 0.00217 of 0.01" in recorded
    # its processes and a resumed run plan the same config again
    assert main(["resume", str(run), "strategy=mirrored", "strategy.replicas=1"]) == 0


def test_what_the_user_wrote_without_effect_is_refused_where_a_recipe_is_noted(notes: Callable[..., list[str]]) -> None:
    (problem,) = notes("recipe=null", "steps=20", "warmup.steps=30", code=2)
    assert problem.startswith("warmup.steps=30: 30 steps of warmup, and the training has 20")
    assert notes("recipe=null") == [ADAMW_NOTE], "the shipped pattern type:*Norm* suits other models"
    patterns = "optimizer.groups={wide:{match:['layers.0.*','blocks.*'],lr:0.1},again:{match:['*.0.bias']}}"
    first, second = notes("recipe=null", "optimizer=sgd", patterns, code=2)
    assert first.startswith("optimizer.groups.wide.match=blocks.*: matches no parameter that is trained")
    assert second.startswith("optimizer.groups.again: holds no parameter: earlier groups match the same")


def test_groups_of_the_user_name_parameters(notes: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning_notes, "_SHOWN", 1)
    groups = "optimizer.groups={head:{match:['layers.2.*'],lr:0.1},none:{match:['*.bias']}}"
    assert notes("recipe=null", "optimizer=sgd", groups) == [
        "optimizer.groups.head holds 2 of 4 parameters: layers.2.weight and 1 more",
        "optimizer.groups.none holds 1 of 4 parameters: layers.0.bias",
    ]


def test_data_without_validation_is_noted_or_refused(notes: Callable[..., list[str]], points: tuple[str, ...]) -> None:
    none = "the data has no validation split: nothing is evaluated, and no checkpoint is the best"
    assert none in notes("recipe=null", *points)
    needs_it = ("eval.metric=val/accuracy", "callbacks=[early_stop]")
    metric, early_stop = notes("recipe=null", *points, *needs_it, code=2)
    assert metric.startswith("eval.metric=val/accuracy: there is no such metric: the data has no validation split")
    assert early_stop.startswith("callbacks.early_stop: needs evaluations, and the data has no validation split")
    # the metric of the digits recipe is not the user's
    assert "eval.metric=val/accuracy is left out" in notes(*points)


def test_a_loss_in_parts_is_refused_where_graphs_of_steps_use_all_scores(notes: Callable[..., list[str]]) -> None:
    small = ("recipe=null", "model=gpt", "model.num_layers=1", "model.num_heads=1", "model.width=8", "model.context=8",
             "model.vocab_size=16", "data=synthetic_tokens", "data.vocab_size=16", "data.context=8", "steps=2",
             "objective=language_modelling", "objective.padding=false", "compile.mode=step")  # fmt: skip
    lines = notes(*small, "objective.cross_entropy=chunked", code=2)
    (note,) = [line for line in lines if line.startswith("objective.cross_entropy")]
    assert note.startswith("objective.cross_entropy=chunked: has no effect with compile.mode=step, whose graphs")
    notes(*small, "objective.cross_entropy=plain")


FIXED = ("recipe=null", "data=synthetic", "data.num_classes=10", "data.num_samples=8", "data.val_samples=1",
         "objective=classification", "batch.global_size=4", "steps=1", "eval.every_epochs=null", "logger=[]",
         "callbacks=[]", "quiet=true")  # fmt: skip
SMALL = (*FIXED, "model=resnet", "model.depth=18", "model.num_classes=10")


class Summed(nn.Module):
    """Sums the outputs of a convolution over all positions; volumes are images whose channels are the depth."""

    def __init__(self, kind: str, padding_mode: Literal["zeros", "replicate"]) -> None:
        super().__init__()
        self.kind = kind
        if kind == "transposed":
            self.layer: nn.Module = nn.ConvTranspose2d(3, 10, 3, stride=2, padding=1)
        else:
            self.layer = nn.Conv3d(1, 10, 3, padding="same", padding_mode=padding_mode)

    def forward(self, images: Tensor) -> Tensor:
        volumes = images if isinstance(self.layer, nn.ConvTranspose2d) else images.unsqueeze(1)
        parts = [volumes[:, :, :2], volumes] if self.kind == "called twice" else [volumes]
        return torch.stack([self.layer(input=part).flatten(2).sum(2) for part in parts]).sum(0)


def check(*overrides: str) -> None:
    """Check a run before it starts. It is not trained: with the kernel, its weights would be random."""
    composition = checked(api.compose([*overrides], packages=["tests"]))
    with allow_packages(composition.packages):
        plan = make_plan(composition.cfg)
        model_notes(plan, meta_model(plan.cfg))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "precision", "has_the_kernel", "refused"),
    [
        ("[3,16,16]", "bf16_mixed", True, True),
        ("[3,32,1]", "bf16_mixed", True, True),
        ("[3,32,32]", "bf16_mixed", True, False),
        ("[3,16,16]", "fp32", True, False),
        ("[3,16,16]", "bf16_mixed", False, False),
    ],
)
def test_images_that_become_smaller_than_a_stride_are_refused_in_bfloat16_alone(
    shape: str, precision: str, has_the_kernel: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolutions, "has_the_kernel", lambda: has_the_kernel)
    message = r"precision=bf16_mixed: may have a wrong gradient on this CPU in \w+\.\d"
    with pytest.raises(ConfigError, match=message) if refused else nullcontext():
        check(*SMALL, f"data.shape={shape}", f"precision={precision}")


@pytest.mark.parametrize(
    ("kind", "shape", "padding_mode", "refused"),
    [
        ("volume", "[2,4,4]", "zeros", True),
        ("volume", "[2,4,4]", "replicate", False),
        ("volume", "[3,2,2]", "zeros", False),
        ("called twice", "[3,4,4]", "zeros", True),
        ("transposed", "[3,1,4]", "zeros", True),
        ("transposed", "[3,2,4]", "zeros", False),
    ],
)
def test_volumes_smaller_than_a_kernel_and_outputs_smaller_than_a_stride_are_refused(
    kind: str, shape: str, padding_mode: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolutions, "has_the_kernel", lambda: True)
    model = (f"model._target_={Summed.__module__}.Summed", f"model.kind={kind}", f"model.padding_mode={padding_mode}")
    message = "may have a wrong gradient on this CPU in layer"
    with pytest.raises(ConfigError, match=message) if refused else nullcontext():
        check(*FIXED, *model, f"data.shape={shape}", "precision=bf16_mixed")


GAN = ("recipe=gan", "callbacks=[]", "logger=[]")
LINEAR = "{_target_:trainkit.schedules.Linear}"
BODY = "optimizers.body.match=['layers.0.*']"
ON_SERVERS = ("strategy=parameter_server", BODY, "optimizers.head.match=['layers.2.*']")


def planned(*overrides: str) -> RunPlan:
    plan = make_plan(checked(compose(list(overrides))).cfg)
    model_notes(plan, meta_model(plan.cfg))
    return plan


def refused(*overrides: str) -> list[Problem]:
    with pytest.raises(ConfigError) as error:
        planned(*overrides)
    return list(error.value.problems)


@pytest.mark.parametrize(
    ("overrides", "key", "part"),
    [
        (("optimizers.body.match=['layer.*']",), "optimizers.body.match", "matches no parameter"),
        ((BODY, "optimizers.head.match=['*.weight']"), "optimizers.head.match", "layers.0.weight"),
        ((BODY,), "optimizers", "no optimizer takes layers.2.weight, layers.2.bias"),
        (("optimizers.all.match=['*']", "optimizers.none.lr=0.1"), "optimizers.none", "takes no param"),
        (("optimizers.a.lr=1", "optimizers.b.lr=1"), "optimizers.b", "so does a"),
        (("optimizers.a.ratio=2/3",), "optimizers.a.ratio", "1/N"),
        (("optimizers.a.ratio=2",), "optimizers.a.ratio", "names no phases"),
        (("optimizers.a={_target_:torch.optim.SGD,lr:1,lrr:2}",), "optimizers.a.lrr", "lr"),
        (("recipe=gan", "optimizers={}"), "optimizers", "discriminator, generator"),
        (("recipe=gan", "optimizers.critic.lr=1"), "optimizers.critic", "no such phase"),
        (("recipe=gan", "optimizers.generator.ratio=1/2", "optimizers.discriminator.ratio=1/3"), "optimizers", "no ph"),
        ((*GAN, "optimizers.generator.lr=1", "optimizer.lr=2"), "optimizer.lr", "has no effect"),
        ((*ON_SERVERS, "callbacks=[plateau]"), "callbacks.plateau", "servers compute the rates"),
        ((*ON_SERVERS, "stop_after=1min"), "stop_after", "servers compute the rates"),
    ],
)
def test_a_misfit_is_refused_by_its_key(overrides: tuple[str, ...], key: str, part: str) -> None:
    recipe = () if "recipe=gan" in overrides else ("recipe=null",)
    assert [(misfit.key, part in misfit.rule) for misfit in refused(*recipe, *overrides)] == [(key, True)]


@pytest.mark.slow
def test_a_strategy_takes_several_optimizers_or_refuses_them_by_name() -> None:
    taking = {"one_device", "device_map", "mirrored", "multi_worker_mirrored", "fsdp", "mesh", "tensor_parallel"}
    for strategy in sorted(path.stem for path in (CONF / "strategy").glob("*.yaml")):
        keys = (*GAN, f"strategy={strategy}")
        if strategy in taking:
            assert [spec.name for spec in planned(*keys).optimizers] == ["discriminator", "generator"]
        else:
            assert "optimizers" in [misfit.key for misfit in refused(*keys)], strategy


def test_frozen_parameters_need_no_optimizer_and_a_pattern_for_them_alone_is_refused() -> None:
    plan = planned(*GAN)
    model = meta_model(plan.cfg)
    params = [param for name, param in model.named_parameters() if name.startswith("generator.")]
    for param in params:
        param.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"optimizers\.generator\.match.* frozen parameters"):
        model_notes(plan, model)
    params[0].requires_grad_(True)
    assert any("updates 2,048 parameters: generator.0.weight" in note for note in model_notes(plan, model))


def test_the_memory_of_all_optimizers_is_planned() -> None:
    with_adam = planned(*GAN, "precision=fp32")
    with_sgd = planned(*GAN, "optimizers.generator={_target_:torch.optim.SGD,lr:0.1,match:['generator.*']}")
    sizes = [memory_of(plan, meta_model(plan.cfg)).optimizer_bytes or 0 for plan in (with_adam, with_sgd)]
    count = sum(
        param.numel() for name, param in meta_model(with_adam.cfg).named_parameters() if name.startswith("generator.")
    )
    assert 0 <= sizes[0] - sizes[1] - 2 * 4 * count <= 64  # two moments, and a count of steps a tensor


def test_the_gan_recipe_logs_each_phase_and_writes_its_pictures(tmp_path: Path) -> None:
    settings = ["recipe=gan", "callbacks=[pictures]", "logger=[]", "epochs=null", "steps=6", "log_every_steps=2"]
    settings += ["optimizers.generator.ratio=1/2", f"optimizers.generator.schedule={LINEAR}"]
    result = trainkit.train(trainkit.compose(settings), run_dir=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rates = [row["lr/generator"] for row in rows if "lr/generator" in row]
    assert rates == pytest.approx([0.0005 * (1 - step / 6) for step in (1, 3, 5)])
    assert {"train/discriminator", "train/generator", "lr/discriminator"} <= rows[0].keys()
    assert {"val/loss", "val/real", "val/fake"} <= result["metrics"].keys()
    (picture,) = (tmp_path / "pictures").iterdir()
    assert picture.name == "step_000006.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_run_resumes_on_another_number_of_replicas(tmp_path: Path) -> None:
    def trained(name: str, *keys: str) -> dict[str, Any]:
        return trainkit.train(trainkit.compose([*common, *keys]), run_dir=tmp_path / name)

    common = [*GAN, "epochs=null", "steps=6", "batch.micro_size=32", "precision=fp64", "eval.every_epochs=null"]
    whole = trained("whole")
    trained("first", "strategy=fsdp", "strategy.replicas=2", "stop_at_step=3")
    resumed = trained("second", f"resume={tmp_path / 'first'}")
    expected, tensors = (load(Path(result["last"])).tensors for result in (whole, resumed))
    assert expected.keys() == tensors.keys()
    for name, tensor in expected.items():
        assert torch.allclose(tensors[name], tensor, rtol=1e-12, atol=1e-12), name


LAUNCH = {"TF_CONFIG": '{"cluster": {"worker": ["10.0.0.1:1", "10.0.0.2:1"]}, "task": {"type": "worker", "index": 1}}'}


def sent(plan: RunPlan) -> RunPlan | None:
    """Return the plan of a rank that reads `resolved.yaml` and the variable."""
    return plan_from_environ(plan_to_environ(plan), RunConfig.from_dict(plan.cfg.to_dict()))


@pytest.mark.parametrize(
    "arguments",
    [
        ["strategy=mirrored", "strategy.replicas=2"],
        ["strategy=fsdp", "strategy.replicas=2", "batch.drop_last=true", "warmup.epochs=0.1", "optimizer.lr=0.1"],
        ["strategy=parameter_server", "strategy.workers=2", "lr_scaling.reference_batch=48", "epochs=3"],
    ],
)
def test_a_rank_has_the_plan_that_its_parent_sent(arguments: list[str]) -> None:
    plan = make_plan(trainkit.compose(["recipe=digits", *arguments]).cfg, num_gpus=0)
    received = sent(plan)
    assert received is not None
    for name in {field.name for field in fields(plan)} - {"components", "context"}:
        assert getattr(received, name) == getattr(plan, name), name
    assert received.context.num_gpus == plan.context.num_gpus
    assert received.context.micro_size == plan.context.micro_size
    assert received.auxiliary_ranks == plan.auxiliary_ranks


def test_the_launch_of_a_host_travels_with_the_plan() -> None:
    launch = detect(LAUNCH)
    cfg = trainkit.compose(["recipe=digits", "strategy=multi_worker_mirrored"]).cfg
    received = sent(make_plan(cfg, num_gpus=0, launch=launch))
    assert received is not None
    assert received.context.launch == launch
    assert len(received.tasks) == 2


def test_a_rank_whose_data_has_another_size_is_refused() -> None:
    plan = make_plan(trainkit.compose(["recipe=digits"]).cfg, num_gpus=0)
    other = replace(plan, batch=replace(plan.batch, num_samples=7))
    with pytest.raises(DataError, match="1437 samples in this process, and 7 in the process that planned the run"):
        sent(other)


def test_a_rank_without_a_plan_makes_its_own_and_a_malformed_one_is_refused() -> None:
    cfg = make_plan(trainkit.compose(["recipe=digits"]).cfg, num_gpus=0).cfg
    assert plan_from_environ({}, cfg) is None
    for text in ("{", "[]", '{"tasks": 1}'):
        with pytest.raises(TrainkitError, match=f"^{VARIABLE} holds no plan: "):
            plan_from_environ({VARIABLE: text}, cfg)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "has", "noted"), [
    ("bf16_mixed", False, True), ("bf16", False, True), ("bf16_mixed", True, False), ("fp32", False, False),
])  # fmt: skip
def test_a_processor_without_instructions_for_bfloat16_is_noted(
    precision: str, has: bool, noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    able = {"architecture": "x86_64", "avx512_bf16": has, "amx_bf16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able, raising=False)
    plan = make_plan(compose(["recipe=digits", f"precision={precision}"]).cfg, num_gpus=0)
    notes = model_notes(plan, meta_model(plan.cfg))
    assert noted == any(note.startswith(f"precision={precision}: this processor has no inst") for note in notes)
