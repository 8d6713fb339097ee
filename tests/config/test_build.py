"""A node whose nested nodes are not built, or whose arguments are dropped silently, is caught here alone."""

import enum
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from trainkit.config.targets.allowed import allow_packages
from trainkit.config.targets.build import build, resolve_target, signature_of
from trainkit.errors import ConfigError


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
    made = build({"_target_": f"{HERE}.Outer", "sizes": [1, 2], "path": "x/y", "mode": "fast"})
    assert made == Outer(sizes=(1, 2), path=Path("x/y"), mode=Mode.fast)


def test_nested_nodes_are_built_first_also_in_lists_and_mappings() -> None:
    node = {"_target_": f"{HERE}.Inner", "size": 3}
    made = build({"_target_": f"{HERE}.Outer", "inner": node, "others": [node], "extra": {"a": node}})
    assert made.inner == made.others[0] == made.extra["a"] == Inner(size=3)
    assert build({"_target_": f"{HERE}.Outer", "inner": {"size": 4}}).inner == Inner(size=4)


def test_injected_arguments_are_passed_and_nothing_is_dropped() -> None:
    assert build({"_target_": f"{HERE}.Inner"}, size=5).size == 5
    with pytest.raises(TypeError, match="colour"):
        build({"_target_": f"{HERE}.Inner", "colour": "red"})


def test_functions_and_inner_classes_are_targets_too() -> None:
    with allow_packages(["json", "collections"]):
        assert resolve_target("json.dumps") is json.dumps
        assert build({"_target_": "collections.Counter", "a": 3})["a"] == 3


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("timm.create_model", "there is no module timm."),
        ("collections.Cuonter", "there is no Cuonter in collections."),
        ("math.pi", "is neither a class nor a function."),
    ],
)
def test_a_target_that_is_none_is_named(target: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with allow_packages(["collections", "math"]), pytest.raises(ConfigError) as caught:
        resolve_target(target)
    assert str(caught.value.problems[0]).startswith(f"_target_={target}: {words}")


def test_a_module_that_needs_what_is_absent_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needy.py").write_text("import absent_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with allow_packages(["needy"]), pytest.raises(ConfigError, match="its module needs absent_package, which is not"):
        resolve_target("needy.Net")


def test_a_node_without_target_is_refused() -> None:
    with pytest.raises(ConfigError, match="_target_: is missing next to width"):
        build({"width": 3})


def test_a_signature_tells_keys_defaults_and_whether_there_may_be_more() -> None:
    def make(size: int, *rest: int, rate: float = 0.5, **more: int) -> None: ...

    signature = signature_of(make)
    assert {name: key.required for name, key in signature.keys.items()} == {"size": True, "rate": False}
    assert signature.takes_more
    assert [*signature_of(Inner).keys] == ["size"]


def test_a_class_whose_annotations_do_not_resolve_still_has_keys() -> None:
    class Odd:
        def __init__(self, size: "Nowhere" = 3) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    assert [*signature_of(Odd).keys] == ["size"]
