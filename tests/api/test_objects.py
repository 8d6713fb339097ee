"""An object of a Python session that is trained in place, or replaced silently by a choice, is caught here alone.

A key given by name that arrives as another value, or not at all, is caught here alone.
A setting that Python takes and the command line refuses, or a flag as advice in Python, is caught here alone.
"""

from __future__ import annotations

import functools
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import TensorDataset

import trainkit
from tests.support.refusing import refused
from trainkit.api.calls import Objects, TrainingResult, composed, module_of, source_of
from trainkit.cli import main
from trainkit.config.interface import advice, called_from
from trainkit.errors import ConfigError
from trainkit.models.sampling import Sampling
from trainkit.objectives.distillation import Distillation
from trainkit.testing import assert_same_training

X = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X[:64], (X[:64, 0] > 0).long()), TensorDataset(X[64:], (X[64:, 0] > 0).long())


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def train(folder: Path, model: object, **keys: Any) -> TrainingResult:
    optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    options: dict[str, Any] = {"data": DATA, "objective": "classification", "optimizer": optimizer, "steps": 4, **keys}
    return trainkit.train(["quiet=true"], run_dir=folder, model=model, batch={"global_size": 32}, **options)


@pytest.mark.slow
def test_the_given_model_is_where_the_training_begins_and_stays_as_it_is(tmp_path: Path) -> None:
    model = net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = train(tmp_path / "run", model, optimizer=functools.partial(torch.optim.SGD, lr=0.0))
    assert all(torch.equal(result.model("last").state_dict()[name], tensor) for name, tensor in before.items())
    result = train(tmp_path / "other", model, stop_at_step=2, callbacks=["plots"])
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert result["resume"] == f'trainkit.train(resume="{tmp_path}/other", ...) with the same objects'
    assert pickle.loads(pickle.dumps(result)) == result, "without the objects"
    assert "data:image/png;base64," in result._repr_html_()
    assert train(tmp_path / "more", net(), resume=tmp_path / "other", data=(Rows(), Rows()))["steps"] == 4


class Rows:
    """A dataset that derives from nothing."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return X[index], int(X[index, 0] > 0)


@pytest.mark.slow
def test_a_model_whose_hooks_compute_a_weight_is_copied_for_each_thread(tmp_path: Path) -> None:
    model = net()
    prune.l1_unstructured(model.get_submodule("0"), "weight", amount=0.5)  # type: ignore[no-untyped-call]
    model(X)
    alone, two = (train(tmp_path / name, model, strategy=name) for name in ("one_device", "central_storage"))
    assert two["metrics"]["val/loss"] == pytest.approx(alone["metrics"]["val/loss"], rel=1e-5)


def test_objects_that_can_be_imported_are_nodes_for_every_strategy() -> None:
    objects = Objects()
    assert objects.add("optimizer", torch.optim.AdamW(net().parameters(), lr=0.2, betas=(0.8, 0.9))) == []
    node = objects.nodes["optimizer"]
    assert (node["_target_"], node["lr"], node["betas"]) == ("torch.optim.adamw.AdamW", 0.2, [0.8, 0.9])
    assert objects.add("model", functools.partial(nn.Linear, 4, out_features=2)) == []
    assert objects.nodes["model"] == {
        "_target_": "torch.nn.modules.linear.Linear", "in_features": 4, "out_features": 2,
    }  # fmt: skip
    assert (objects.in_process, objects.packages) == (False, [])
    (problem,) = objects.add("model", functools.partial(nn.Linear, 4))
    assert problem.rule.startswith("Linear needs out_features.")


def test_a_strategy_of_several_processes_refuses_objects_and_names_the_remedy(tmp_path: Path) -> None:
    model, data = refused(train, tmp_path / "run", net(), strategy="mirrored")
    assert model.startswith("model: ")
    assert data.startswith("data: ")
    assert "imported by name" in model + data
    assert not (tmp_path / "run").exists()


def test_every_object_of_a_wrong_kind_is_refused_at_once(tmp_path: Path) -> None:
    problems = refused(train, tmp_path / "run", 3, data="digits", objective=nn.CrossEntropyLoss(), optimizer=net())
    assert [problem.partition(":")[0].partition("=")[0] for problem in problems] == ["model", "objective", "optimizer"]
    assert "classification (cross-entropy)" in "".join(problems)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"data": (X, X)}, "data: is given as tuple. It must be a dataset, such as TensorDataset(x, y)"),
        ({"data": [*DATA, None]}, "data: is given as list. It must be a dataset"),
        ({"optimizer": torch.optim.SGD}, "optimizer: is given without lr, the base learning rate."),
        ({"schedule": torch.optim.lr_scheduler.StepLR}, "schedule: is given as type. Keys take numbers"),
        ({"callbacks": [print]}, "callbacks: is given as builtin_function_or_method. Keys take numbers"),
        ({"objective": functools.partial(Distillation, share=0.5)}, "objective: Distillation needs teacher. Give"),
        ({"objective": "clasification"}, "objective=clasification: no such choice. Did you mean classification?"),
    ],
)
def test_what_a_group_does_not_take_is_refused_by_its_key(keys: dict[str, Any], expected: str, tmp_path: Path) -> None:
    assert [problem[: len(expected)] for problem in refused(train, tmp_path / "run", net(), **keys)] == [expected]


class Bare(nn.Module):
    """A model that forgets to initialise its base class."""

    def __init__(self) -> None:
        pass


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Flatten(), "model: has no parameter to train."),
        (nn.Linear(5, 2), "model: the layer takes 5 features, and it gets 4."),
        (Bare, "Bare.__init__ does not call super().__init__()"),
    ],
)
def test_a_model_that_cannot_train_is_refused_by_its_group(model: object, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        train(tmp_path / "run", model)


@pytest.mark.slow
def test_groups_of_parameters_stay_beside_an_optimizer_object(tmp_path: Path) -> None:
    model = net()
    options: dict[str, Any] = {"data": DATA, "objective": "classification", "steps": 2}
    groups = ["quiet=true", "optimizer.groups.frozen.match=['*']", "optimizer.groups.frozen.lr=0"]
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    result = trainkit.train(groups, run_dir=tmp_path / "run", model=model, optimizer=sgd, **options)
    trained = result.model("last").state_dict()
    assert all(torch.equal(trained[name], tensor) for name, tensor in model.state_dict().items())


def test_an_optimizer_updates_all_parameters_of_the_model_that_are_trained() -> None:
    model = net()
    head = torch.optim.SGD(model.get_submodule("2").parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"optimizer: updates 2 of the 4 parameters"):
        trainkit.train(model=model, data=DATA, optimizer=head)
    model.get_submodule("0").requires_grad_(False)
    nothing = dict.fromkeys(("data", "objective"))
    assert composed([], {**nothing, "model": model, "optimizer": head}, {}, write_source=False)[1].nodes["optimizer"]


def test_keys_of_a_choice_that_an_object_replaces_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.hidden: has no effect: model is given as an object"):
        trainkit.train(["model.hidden=[3]"], model=net(), data=DATA)


def test_the_source_holds_what_a_class_names(tmp_path: Path) -> None:
    file = tmp_path / "cells.py"
    file.write_text(
        "import math\nfrom torch import nn\nSIZE = 3\nSECRET = object()\n"
        "def scaled(x):\n    return x * math.pi\n"
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.size = SIZE\n"
        "    def forward(self, x):\n        return scaled(x)\n"
        "class Odd(nn.Module):\n    def forward(self, x):\n        return SECRET\n"
    )
    cells = {"__name__": "__main__"}
    exec(compile(file.read_text(), str(file), "exec"), cells)
    module = module_of(source_of({"model": cells["Net"]}))  # type: ignore[dict-item]
    assert module.Net()(torch.ones(())).item() == pytest.approx(3.14159, abs=1e-4)
    assert module.Net.__module__ == module.__name__
    with pytest.raises(ConfigError, match=r"model: Odd uses SECRET, a object of this session"):
        source_of({"model": cells["Odd"]})  # type: ignore[dict-item]


NOTHING = dict.fromkeys(("model", "data", "objective", "optimizer"))


def values(**keys: Any) -> Mapping[str, Any]:
    """The values that a call with these keys composes."""
    return composed([], NOTHING, keys, write_source=False)[0].values


def test_a_text_stays_this_text_and_an_empty_mapping_leaves_callbacks_and_loggers_out() -> None:
    for name in ("null", "true", "nan", "1e5", "0x1", "1_000"):
        assert values(name=name)["name"] == name
    config = values(callbacks={}, logger={})
    assert (config["callbacks"], config["logger"]) == ({}, {})


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"epohs": {}}, "epohs: no such key. Did you mean epochs?"),
        ({"loader": {}}, "loader={}: belongs to every run and cannot be cleared. Give values: loader.KEY=VALUE."),
        ({"steps": 1j}, "steps: is given as complex. Keys take numbers, texts and lists"),
        ({"cluster": {"x": [{"y": {1}}]}}, "cluster.x.y: is given as set. Keys take numbers, texts and lists"),
    ],
)
def test_what_has_no_effect_is_refused_by_name(keys: Mapping[str, Any], line: str) -> None:
    assert [text.startswith(line) for text in refused(values, **keys)] == [True]


def test_numbers_paths_and_keys_with_dots_arrive_as_given() -> None:
    keys = {"optimizer.lr": np.float32(0.5), "epochs": np.int64(3), "report_page": np.bool_(False)}
    node = {"_target_": "torch.nn.Identity", "weights": {"layer.0": 1.5, "b": [{"c": "x, y"}, None]}}
    config = values(**keys, resume=Path("a b/c=1\\d"), callbacks={"mine": node})
    assert (config["optimizer"]["lr"], config["epochs"], config["report_page"]) == (0.5, 3, False)
    assert (config["resume"], config["callbacks"]["mine"]) == ("a b/c=1\\d", node)


def test_a_mapping_gives_keys_of_the_choice_of_a_group() -> None:
    objects = {**NOTHING, "model": {"hidden": [7]}, "optimizer": {"lr": 0.25}}
    config = composed([], objects, {}, write_source=False)[0].values
    assert (config["model"]["hidden"], config["optimizer"]["lr"]) == ([7], 0.25)


OWN = ["recipe=null", "steps=1", "quiet=true", "callbacks=[]", "logger=[]", "model._target_=test_doors_kit.Net"]
NET = """\
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
"""
NAN = float("nan")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"temperature": NAN}, "temperature=nan: must be a number, 0 or more."),
        ({"top_p": 1.5}, "top_p=1.5: must be a number above 0, at most 1."),
        ({"top_k": 2.0}, "top_k=2.0: must be a whole number, 1 or more."),
        ({"max_tokens": -3}, "max_tokens=-3: must be a whole number, 1 or more."),
        ({"temperature": 0.0, "top_k": 3}, "top_k=3: has no effect: the most likely token is chosen."),
        ({"seed": 3}, "seed=3: has no effect: the most likely token is chosen."),
    ],
)
def test_generate_refuses_what_its_verb_refuses(settings: dict[str, Any], problem: str) -> None:
    (message,) = refused(trainkit.generate, "no run", ["a"], **settings)
    assert message.startswith(problem)


def test_other_calls_refuse_what_their_verbs_refuse(cwd: Path) -> None:
    Path("file").touch()
    parts = {"model": nn.Linear(2, 3), "dataset": torch.zeros(5, 2)}
    assert refused(Sampling, temperature=-1.0) == ["temperature=-1.0: must be a number, 0 or more."]
    assert refused(trainkit.predict, **parts, batch_size=0) == ["batch_size=0: must be a whole number, 1 or more."]
    assert refused(trainkit.predict, **parts, checkpoint="bst") == ["checkpoint=bst: must be best or last."]
    assert refused(trainkit.load, "file", checkpoint="bst") == ["checkpoint=bst: must be best or last."]
    assert refused(trainkit.train, run_dir="") == ["run_dir=: is empty. Name a folder."]
    assert refused(trainkit.session, run_dir="file/x") == ["run_dir=file/x: file is no folder."]
    steps = ["steps=0: must be a whole number, 1 to 1,000,000."]
    assert refused(assert_same_training, ["recipe=null"], strategies=["mirrored strategy.replicas=2"], steps=0) == steps
    assert [*cwd.iterdir()] == [cwd / "file"]


def test_python_is_told_its_own_names_and_they_work(
    cwd: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(cwd)
    Path("test_doors_kit.py").write_text(NET)
    (message,) = refused(trainkit.train, OWN)
    assert message.split(" To trust it: ")[1] == 'packages=["test_doors_kit"]. (command line)'
    assert trainkit.train(OWN, packages=["test_doors_kit"])["steps"] == 1
    assert main(OWN) == 2
    assert "To trust it: --allow-package test_doors_kit. (command line)" in capsys.readouterr().err
    message, *_ = refused(trainkit.train, ["--allow-package", "test_doors_kit"])
    assert message.startswith("--allow-package: is not key=value. Flags have names in Python: packages=[...]")
    assert refused(trainkit.compose, config_dirs=["no"])[0] == f'config_dirs=["{cwd}/no"]: is not a folder.'
    with_config = refused(trainkit.train, trainkit.compose(["recipe=null"]), packages=["test_doors_kit"])
    assert with_config == ["packages: is given together with a whole config. Give it to trainkit.compose."]


def test_a_call_within_a_call_keeps_its_door() -> None:
    assert advice("flag", "name") == "flag"
    with called_from("python"), called_from("command line"):
        assert advice("flag", "name") == "name"


@pytest.mark.slow
def test_a_config_made_of_dataclasses_is_the_training_of_the_same_arguments(tmp_path: Path) -> None:
    model = {"_target_": "trainkit.models.Mlp", "in_features": 64, "hidden": [8], "out_features": 10}
    cfg = trainkit.RunConfig(steps=3, seed=5, model=model, quiet=True)
    result = trainkit.train(cfg, run_dir=tmp_path / "made", packages=["tests"])
    lines = ["recipe=null", "epochs=null", "steps=3", "seed=5", "model.hidden=[8]", "callbacks=[]", "logger=[]"]
    same = trainkit.train([*lines, "quiet=true"], run_dir=tmp_path / "composed")
    first, second = result.model("last").state_dict(), same.model("last").state_dict()
    assert all(torch.equal(first[name], tensor) for name, tensor in second.items())
    assert not (result.folder / "tensorboard").exists()
