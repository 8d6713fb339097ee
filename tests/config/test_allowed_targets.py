"""A way around the allow-list that runs foreign code is caught here alone; all that people use is built."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from tests.config.conftest import Refuse, Write
from tests.support.attempts import ATTEMPTS, filled, set_up
from trainkit.cli import main
from trainkit.config.check import checked
from trainkit.config.compose import compose
from trainkit.config.targets.allowed import ALLOWED_PACKAGES, allow_packages, allowed_packages
from trainkit.config.targets.build import build, resolve_target, signature_of
from trainkit.config.targets.kinds import PLACES
from trainkit.errors import ConfigError


@pytest.fixture
def canary(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that every attempt would write; its modules can be imported."""
    monkeypatch.syspath_prepend(cwd)
    yield set_up(cwd)
    for name in [name for name in sys.modules if name.startswith(("evil_", "timm"))]:
        del sys.modules[name]


def problem(target: str, place: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_target(target, *([PLACES[place]] if place else []))
    return str(caught.value.problems[0]).removeprefix(f"_target_={target}: ")


@pytest.mark.parametrize("name", ATTEMPTS)
def test_an_attempt_is_refused_by_the_check_of_a_config_and_by_every_builder(canary: Path, name: str) -> None:
    group, node = ATTEMPTS[name]
    node = filled(node, Path.cwd())
    for written in ("conf", "recipes"):  # a choice of a group, and a recipe
        values = {group: {"evil": node} if group in ("callbacks", "logger") else node}
        recipe = {"defaults": ["_self_"], **values} if written == "recipes" else values
        file = Path(written, "recipe" if written == "recipes" else group, "evil.yaml")
        file.parent.mkdir(parents=True)
        file.write_text("# @package _global_\n" + yaml.safe_dump(recipe))
    choice = f"{group}=[evil]" if group in ("callbacks", "logger") else f"{group}=evil"
    for folder, arguments in (("conf", ["recipe=null", choice]), ("recipes", ["recipe=evil"])):
        with pytest.raises(ConfigError):
            checked(compose(arguments, config_dirs=[folder]))
    if "groups" not in node:  # a parameter group is given to the optimizer as it is
        with pytest.raises(ConfigError):
            build(node, group)
    assert not canary.exists()


REFUSED = {
    "torch.os.system": "of torch, targets may come from torch.nn, torch.optim and torch.utils.data only.",
    "trainkit.run.begin.subprocess.getoutput": "trainkit has no class of this name for configs.",
    "trainkit.models.mlp.Mlp": "write trainkit.models.Mlp.",
    "trainkit.models.Mpl": "there is no Mpl. Did you mean trainkit.models.Mlp?",
    "torch.optim.SGD": "is no torch.nn.Module, which model needs.",
    "torch.utils.data.datapipes.iter.FileOpener": "is defined in torch.utils.data.datapipes.iter.fileopener, which",
    "transformers.is_torch_available": "is a function; of transformers a config may name classes and from_config",
}


@pytest.mark.parametrize("target", REFUSED)
def test_a_refusal_says_the_rule(target: str) -> None:
    place = "model" if target.startswith("torch.optim.") else None
    assert problem(target, place).startswith(REFUSED[target])


def test_a_nested_class_fits_the_annotation_of_its_key() -> None:
    linear = {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 2}
    node = {"_target_": "trainkit.models.Ensemble", "members": [linear]}
    assert isinstance(build(node, "model").members[0], nn.Linear)
    with pytest.raises(ConfigError, match=r"model\.members\.0\._target_=torch\.optim\.SGD: is no Module"):
        build({**node, "members": [{"_target_": "torch.optim.SGD"}]}, "model")


@pytest.mark.slow
def test_models_and_configs_of_transformers_are_built() -> None:
    config = {"_target_": "transformers.GPT2Config", "n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": 9}
    assert "num_labels" in signature_of(resolve_target("transformers.GPT2Config")).keys  # set as an attribute
    for node in (
        {"_target_": "transformers.GPT2LMHeadModel", "config": config},
        {"_target_": "transformers.AutoModelForCausalLM.from_config", "config": config},
    ):
        assert build(node, "model").lm_head.out_features == 9
    with pytest.raises(ConfigError, match="Module, which model needs"):
        build(config, "model")


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"trust_remote_code": "yes"}, "model.trust_remote_code=yes: runs code that is downloaded."),
        ({"attn_implementation": "evil/kernel"}, "model.attn_implementation=evil/kernel: a name with / is a kernel"),
        ({"x": [{"_attn_implementation_internal": "a/b"}]}, "model.x.0._attn_implementation_internal=a/b: a name with"),
    ],
)
def test_what_transformers_would_download_and_run_is_refused(more: dict[str, Any], text: str) -> None:
    node = {"_target_": "transformers.AutoModel.from_pretrained", "pretrained_model_name_or_path": "x", **more}
    with pytest.raises(ConfigError, match=re.escape(text)):
        build(node, "model")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of the six that need not be installed, each with what a config names of it."""

    def resnet18(**_: object) -> nn.Module:
        return nn.Identity()

    def create_model(model_name: str, **_: object) -> nn.Module:
        return nn.Identity()

    models: Any = types.ModuleType("torchvision.models")
    resnet18.__module__, create_model.__module__ = "torchvision.models.resnet", "timm.models._factory"
    models.resnet18, models.get_model = resnet18, create_model
    models.list_models = lambda: ["resnet18"]
    models.get_model_builder = {"resnet18": resnet18}.__getitem__
    timm: Any = types.ModuleType("timm")
    torchvision: Any = types.ModuleType("torchvision")
    timm.create_model = create_model
    for name, module in (("timm", timm), ("torchvision", torchvision), ("torchvision.models", models)):
        monkeypatch.setitem(sys.modules, name, module)
    torchvision.models = models


def test_builders_of_torchvision_and_timm_are_called(fake: None) -> None:
    assert isinstance(build({"_target_": "torchvision.models.resnet18"}, "model"), nn.Identity)
    assert isinstance(build({"_target_": "timm.create_model", "model_name": "resnet18"}, "model"), nn.Identity)


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ({"model_name": "hf_hub:evil/net"}, "model.model_name=hf_hub:evil/net: must be a name of timm.list_models()"),
        ({"model_name": "resnet18", "checkpoint_path": "evil.pt"}, "model.checkpoint_path=evil.pt: timm unpickles"),
    ],
)
def test_timm_is_given_names_of_its_own_alone(fake: None, more: dict[str, str], rule: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(rule)):
        build({"_target_": "timm.create_model", **more}, "model")


def test_a_folder_here_does_not_stand_for_a_package_that_is_not_installed(canary: Path) -> None:
    assert problem("timm.create_model").startswith("timm is not installed, and the folder timm here")
    assert not canary.exists()


PACKAGE = """
import os, subprocess
from functools import partial
import torch
from torch.nn import Linear
def make(): return torch.nn.Identity()
class Net(torch.nn.Module):
    @classmethod
    def small(cls): return cls()
bound = partial(make)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package of the person's own, allowed."""
    (tmp_path / "test_allowed_own.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    with allow_packages(["test_allowed_own"]):
        yield "test_allowed_own"


def test_an_allowed_package_gives_what_it_defines(own: str) -> None:
    for name in ("make", "Net", "Net.small"):
        assert isinstance(build({"_target_": f"{own}.{name}"}, "model"), nn.Module)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("os.system", "os is the module os, which {0} imports for itself."),
        ("Linear", "is defined in torch.nn.modules.linear, not in {0}."),
        ("bound", "is defined in functools, not in {0}."),
        ("Net.__subclasses__", "is defined in no module, not in {0}."),
    ],
)
def test_an_allowed_package_gives_nothing_else(own: str, name: str, rule: str) -> None:
    assert problem(f"{own}.{name}").startswith(rule.format(own))


def test_packages_are_allowed_while_a_block_is_open_and_not_longer() -> None:
    before = allowed_packages()
    with allow_packages(["fractions"]), allow_packages(["fractions"]):
        pass
    assert allowed_packages() == before
    assert allowed_packages()[: len(ALLOWED_PACKAGES)] == ALLOWED_PACKAGES


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("absent_package", "there is no such package."),
        ("my.models", "must be only the first part of the module's name: --allow-package my."),
        ("my-models", "must be the name of a package: letters, digits and _ only."),
        ("torch", "needs no flag for its classes of known kinds, and no flag allows the rest of it."),
    ],
)
def test_a_package_that_cannot_be_allowed_is_refused(
    cwd: Path, capsys: pytest.CaptureFixture[str], name: str, rule: str
) -> None:
    for verb in ("train", "ls", "resume"):  # one that composes, one that lists, one that reads a run
        assert main([verb, "--allow-package", name]) == 2
        assert f"  --allow-package {name}: {rule}" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        compose([], packages=[name])


HYDRA = [
    ("callbacks", {"_target_": "os.system", "command": "touch canary"}, "os is not among the packages that Hydra's"),
    ("callbacks", {"_target_": "hydra_plugins.trainkit_launchers.SlotsLauncher"}, "is not a callback of Hydra."),
    (
        "callbacks",
        {"_target_": "hydra.experimental.callbacks.LogJobReturnCallback", "x": [{"_target_": "os.system"}]},
        "os is not among the packages",
    ),
    ("callbacks", "${oc.decode:'{_target_: os.system}'}", "must be written out"),
    ("callbacks", "${model}", "must be a mapping with _target_."),
    ("job_logging.handlers", {"()": "os.system", "command": "touch canary"}, "os is not among the packages"),
    ("job_logging.handlers", {"class": "logging.os.system", "command": "touch canary"}, "os is the module os"),
    ("job_logging.handlers", {"class": "logging.getLogger"}, "is not a handler, formatter or filter of Python's"),
    (
        "job_logging.handlers",
        {"class": "logging.StreamHandler", "stream": "ext://evil_module.x"},
        "evil_module is not among the packages",
    ),
    ("job_logging.handlers", {"class": "${oc.env:HOME}"}, "must be written out"),
]


@pytest.mark.parametrize(("place", "node", "words"), HYDRA)
def test_hydras_own_node_names_its_plugins_alone(
    canary: Path, write_conf: Write, capsys: pytest.CaptureFixture[str], place: str, node: object, words: str
) -> None:
    values = {"evil": node}
    for name in reversed(["hydra", *place.split(".")]):
        values = {name: values}
    folder = write_conf({"recipe/evil.yaml": "# @package _global_\n" + yaml.safe_dump(values)})
    assert main(["--config-dir", str(folder), "recipe=evil", "steps=1"]) == 2
    assert words in capsys.readouterr().err
    assert not canary.exists()


def test_a_launcher_holds_no_node_that_runs_code(canary: Path, refuse: Refuse) -> None:
    node = "+hydra.launcher.a={_target_:os.system,command:'touch canary'}"
    (told,) = refuse("-m", "recipe=null", "steps=1", "seed=1,2", node)
    assert told.startswith("hydra.launcher.a._target_=os.system: os is not among the packages")
    assert not canary.exists()


def test_a_sampler_and_a_dataset_of_torch_are_of_their_kinds() -> None:
    for name in ("TensorDataset", "Subset", "RandomSampler"):
        assert resolve_target(f"torch.utils.data.{name}") is getattr(torch.utils.data, name)
