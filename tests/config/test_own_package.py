"""A mistyped key of a user's own class, or an import of a package that nobody named, is caught here alone."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.config.conftest import Write
from trainkit.config.check import check_names, check_names_first, check_values, checked
from trainkit.config.compose import compose
from trainkit.config.composition import Composition

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


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_conf: Write) -> Callable[..., Composition]:
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


def test_a_users_class_is_built_once_its_package_is_named(own: Callable[..., Composition], tmp_path: Path) -> None:
    assert problems(own()) == []
    (problem,) = problems(own(packages=()))
    assert problem.startswith("model._target_=test_own_nets.Net: test_own_nets is not among the packages that targets")
    assert problem.endswith(f"To trust it: --allow-package test_own_nets. ({tmp_path}/conf/model/mine.yaml:2)")


def test_a_package_that_nobody_named_is_never_imported(own: Callable[..., Composition]) -> None:
    assert problems(own("model._target_=test_own_bad.Net", packages=("test_own_nets",))) != []
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
def test_its_signature_is_its_schema(own: Callable[..., Composition], argument: str, problem: str) -> None:
    (found,) = problems(own(argument))
    assert found.startswith(problem)


def test_problems_of_own_classes_are_reported_together_with_those_of_the_run(own: Callable[..., Composition]) -> None:
    composed = own("model.wdth=3", "model.rates=a", "epochs=0", "model.kind=???")
    assert [problem.key for problem in check_names_first(composed)] == [
        "epochs", "model.kind", "model.wdth", "model.rates",
    ]  # fmt: skip


def test_words_and_mappings_fit_enums_and_dataclasses(own: Callable[..., Composition]) -> None:
    assert problems(own("model.kind=deep", "+model.head={width:4}", "model.rates=[1,0.5]")) == []


def test_keys_that_only_kwargs_take_are_accepted_and_said_to_be_unchecked(own: Callable[..., Composition]) -> None:
    composed = own("model._target_=test_own_nets.Loose", "model.anything=3")
    assert checked(composed).notes == ("model.anything: not checked, its class takes any key",)


def test_an_optional_package_that_is_absent_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    composed = compose(["recipe=null", "model._target_=transformers.GPT2LMHeadModel"])
    (found,) = [text for text in problems(composed) if "_target_" in text]
    assert "its module needs transformers, which is not installed. Install it: pip install" in found
