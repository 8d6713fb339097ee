"""A way around the allow-list that runs foreign code is caught here alone; all that people use is built.

A node whose nested nodes are not built, or whose arguments are dropped silently, is caught here alone.
A mistyped key of a user's own class, or an import of a package that nobody named, is caught here alone.
A key of `data` that names code and is run before it was judged is caught here alone.
"""

from __future__ import annotations

import enum
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn

import trainkit
from tests.config.conftest import Write
from tests.support.attempts import ATTEMPTS, filled, set_up
from tests.support.refusing import Refuse, refused
from trainkit.cli import main
from trainkit.config.check import check_names, check_values, checked
from trainkit.config.compose import compose
from trainkit.config.composition import Composition
from trainkit.config.identity import fingerprint
from trainkit.config.schema import RunConfig
from trainkit.config.targets.allowed import allow_packages
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


def problem(target: str, kind: str | None = None) -> str:
    return refused(resolve_target, target, *([PLACES[kind]] if kind else []))[0].removeprefix(f"_target_={target}: ")


@pytest.mark.slow
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
    kind = "model" if target.startswith("torch.optim.") else None
    assert problem(target, kind).startswith(REFUSED[target])


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


ALLOWED = """
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
def allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package of the user's, allowed."""
    (tmp_path / "test_allowed_own.py").write_text(ALLOWED)
    monkeypatch.syspath_prepend(tmp_path)
    with allow_packages(["test_allowed_own"]):
        yield "test_allowed_own"


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("os.system", "os is the module os, which {0} imports for itself."),
        ("Linear", "is defined in torch.nn.modules.linear, not in {0}."),
        ("bound", "is defined in functools, not in {0}."),
        ("Net.__subclasses__", "is defined in no module, not in {0}."),
    ],
)
def test_an_allowed_package_gives_nothing_else(allowed: str, name: str, rule: str) -> None:
    assert problem(f"{allowed}.{name}").startswith(rule.format(allowed))


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


@pytest.mark.parametrize(("group", "node", "problem"), HYDRA)
def test_hydras_own_node_names_its_plugins_alone(
    canary: Path, write_conf: Write, capsys: pytest.CaptureFixture[str], group: str, node: object, problem: str
) -> None:
    values = {"evil": node}
    for name in reversed(["hydra", *group.split(".")]):
        values = {name: values}
    folder = write_conf({"recipe/evil.yaml": "# @package _global_\n" + yaml.safe_dump(values)})
    assert main(["--config-dir", str(folder), "recipe=evil", "steps=1"]) == 2
    assert problem in capsys.readouterr().err
    assert not canary.exists()


def test_a_launcher_holds_no_node_that_runs_code(canary: Path, refuse: Refuse) -> None:
    node = "+hydra.launcher.a={_target_:os.system,command:'touch canary'}"
    (problem,) = refuse("-m", "recipe=null", "steps=1", "seed=1,2", node)
    assert problem.startswith("hydra.launcher.a._target_=os.system: os is not among the packages")
    assert not canary.exists()


class Mode(enum.Enum):
    fast = "fast"


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int = 1


@dataclass(frozen=True, kw_only=True)
class Outer:
    sizes: tuple[int, ...] = ()
    path: Path | None = None
    mode: Mode = Mode.fast
    inner: Inner = field(default_factory=Inner)
    others: list[Inner] = field(default_factory=list)
    extra: dict[str, object] = field(default_factory=dict)


HERE = __name__


def test_lists_paths_and_enums_become_what_the_annotation_says() -> None:
    component = build({"_target_": f"{HERE}.Outer", "sizes": [1, 2], "path": "x/y", "mode": "fast"})
    assert component == Outer(sizes=(1, 2), path=Path("x/y"), mode=Mode.fast)


def test_nested_nodes_are_built_first_also_in_lists_and_mappings() -> None:
    node = {"_target_": f"{HERE}.Inner", "size": 3}
    component = build({"_target_": f"{HERE}.Outer", "inner": node, "others": [node], "extra": {"a": node}})
    assert component.inner == component.others[0] == component.extra["a"] == Inner(size=3)
    assert build({"_target_": f"{HERE}.Outer", "inner": {"size": 4}}).inner == Inner(size=4)


@pytest.mark.parametrize(
    ("target", "rule"),
    [
        ("timm.create_model", "there is no module timm."),
        ("collections.Cuonter", "there is no Cuonter in collections."),
        ("math.pi", "is neither a class nor a function."),
    ],
)
def test_a_target_that_is_none_is_named(target: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with allow_packages(["collections", "math"]), pytest.raises(ConfigError) as caught:
        resolve_target(target)
    assert str(caught.value.problems[0]).startswith(f"_target_={target}: {rule}")


PACKAGE = """\
from dataclasses import dataclass, field
from typing import Literal
import enum

class Kind(enum.Enum):
    wide = "wide"
    deep = "deep"

@dataclass(frozen=True, kw_only=True)
class Head:
    width: int = 3
    bias: bool = True

class Net:
    def __init__(self, width: int, kind: Kind = Kind.wide, head: Head = Head(), rates: list[float] | None = None):
        pass

class Loose:
    def __init__(self, width: int = 3, **more):
        pass
"""


Compose = Callable[..., Composition]


@pytest.fixture
def own_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_conf: Write) -> Compose:
    """A package `test_own_nets` and a choice `model=mine` that names a class of it."""
    (tmp_path / "test_own_nets.py").write_text(PACKAGE)
    (tmp_path / "test_own_bad.py").write_text("raise RuntimeError('half written')\n")
    monkeypatch.syspath_prepend(tmp_path)
    folder = write_conf({"model/mine.yaml": "# My own\n_target_: test_own_nets.Net\nwidth: 3\n"})

    def run(*arguments: str, packages: tuple[str, str] = ("test_own_nets", "test_own_bad")) -> Composition:
        return compose(["recipe=null", "model=mine", *arguments], config_dirs=[folder], packages=packages)

    return run


def problems(composition: Composition) -> list[str]:
    return [str(problem) for problem in check_names(composition) or check_values(composition)]


def test_a_users_class_is_built_once_its_package_is_named(own_choice: Compose, tmp_path: Path) -> None:
    assert problems(own_choice()) == []
    (problem,) = problems(own_choice(packages=()))
    assert problem.startswith("model._target_=test_own_nets.Net: test_own_nets is not among the packages that targets")
    assert problem.endswith(f"To trust it: --allow-package test_own_nets. ({tmp_path}/conf/model/mine.yaml:2)")


def test_a_package_that_nobody_named_is_never_imported(own_choice: Compose) -> None:
    assert problems(own_choice("model._target_=test_own_bad.Net", packages=("test_own_nets",))) != []
    assert "test_own_bad" not in sys.modules


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("model.wdth=3", "model.wdth: no such key in mine. Did you mean model.width?"),
        ("model.width=wide", "model.width=wide: must be a whole number."),
        ("model.kind=dep", "model.kind=dep: must be wide or deep. Did you mean deep?"),
        ("model.head.wdth=3", "model.head.wdth: no such key. Did you mean model.head.width?"),
        ("model.head.bias=1", "model.head.bias=1: must be true or false."),
        ("~model.width", "model.width: is missing: mine needs it."),
        ("model._target_=test_own_bad.Net", "model._target_=test_own_bad.Net: cannot be imported: RuntimeError: half"),
    ],
)
def test_its_signature_is_its_schema(own_choice: Compose, argument: str, problem: str) -> None:
    (message,) = problems(own_choice(argument))
    assert message.startswith(problem)


def test_keys_that_only_kwargs_take_are_accepted_and_said_to_be_unchecked(own_choice: Compose) -> None:
    composed = own_choice("model._target_=test_own_nets.Loose", "model.anything=3")
    assert checked(composed).notes == ("model.anything: not checked, its class takes any key",)


def test_an_optional_package_that_is_absent_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    composed = compose(["recipe=null", "model._target_=transformers.GPT2LMHeadModel"])
    (message,) = [text for text in problems(composed) if "_target_" in text]
    assert "its module needs transformers, which is not installed. Install it: pip install" in message


CONF = Path(__file__).resolve().parents[1] / "support" / "conf"
OWN = "tests.support.own_data"


def problems_of(argument: str) -> list[str]:
    try:
        checked(trainkit.compose(["recipe=null", argument], config_dirs=[CONF], packages=["tests"]))
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def test_functions_and_classes_are_taken_by_name_or_as_a_node() -> None:
    for argument in (
        f"data.collate={OWN}.pad",
        f"data.collate={{_target_: {OWN}.hide_words, share: 0.1}}",
        "data.collate=trainkit.data.PadSequences",
        "data.sampler=trainkit.data.BalancedClasses",
        "data.collate=null",
    ):
        assert problems_of(argument) == []


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("data.collate=os.system", "data.collate=os.system: os is not among the packages"),
        ("data.collate={_target_: os.system}", "data.collate._target_=os.system: os is not among the packages"),
        (f"data.collate={OWN}.pod", f"data.collate={OWN}.pod: there is no pod in {OWN}."),
        ("data.collate=torch.nn.Linear", "data.collate=torch.nn.Linear: is no collate"),
        ("data.sampler=torch.utils.data.RandomSampler", "data.sampler=torch.utils.data.RandomSampler: is no function"),
        ("data.collate=3", "data.collate=3: must be the dotted name of a function or class"),
        (f"data.collate={OWN}.hide_words", "data.collate.share: is missing: hide_words needs it."),
        (f"data.collate={{_target_: {OWN}.hide_words, shore: 1}}", "data.collate.shore: no such key in hide_words."),
        ("data.collat=x.y", "data.collat: no such key in digits. Did you mean data.collate?"),
    ],
)
def test_what_cannot_be_called_there_is_refused_with_its_key(argument: str, problem: str) -> None:
    assert problems_of(argument)[0].startswith(problem)


def test_a_key_without_a_value_leaves_the_fingerprint_as_it_was() -> None:
    plain = {"data": {"_target_": "trainkit.data.Digits", "scaling": "unit"}}
    unset = {"data": {**plain["data"], "collate": None, "sampler": None}}
    with_default = {"data": {**plain["data"], "collate": "trainkit.data.Lists"}}
    prints = [fingerprint(RunConfig.from_dict(values)) for values in (plain, unset, with_default)]
    assert prints[0] == prints[1] != prints[2]
