"""Every key of every choice and of every recipe has a type, a unit, a default, a meaning and a tag."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainkit.cli import main
from trainkit.config.compose import compose
from trainkit.config.composition import Composition, dotted, leaves
from trainkit.config.described.docstrings import doc_line
from trainkit.config.described.key_facts import REQUIRED, facts_of, target_of
from trainkit.config.described.units import unit_of
from trainkit.config.schema import LIST_GROUPS
from trainkit.config.targets.allowed import allow_packages
from trainkit.config.targets.build import INJECTED, signature_of
from trainkit.config.targets.kinds import PLACES
from trainkit.config.yaml_files import read_document, shipped_conf, shipped_recipes

CHOICES = sorted(shipped_conf().glob("*/*.yaml"))
RECIPES = [file.parent.name for file in sorted(shipped_recipes().glob("*/recipe.yaml"))]
OPEN = {"data.train", "data.val", "data.test", "data.source", "data.val_source", "objective.teacher"}
"""Keys that take any value: a node of any class."""


@pytest.fixture(scope="module")
def base() -> Composition:
    return compose(["recipe=null"])


def with_choice(base: Composition, file: Path) -> Composition:
    """Return a composition with the node of a choice's file; composing each takes too long."""
    group, values = file.parent.name, read_document(file).values
    return replace(base, values={**base.values, group: {file.stem: values} if group in LIST_GROUPS else values})


def incomplete(composition: Composition, values: Mapping[str, Any]) -> Iterator[str]:
    for path, _ in leaves(values):
        facts = facts_of(composition, path)
        lacks_type = facts.type in ("", "any value") and dotted(path) not in OPEN
        if not facts.meaning or not facts.unit or lacks_type:
            yield f"{dotted(path)} {facts}"


@pytest.mark.parametrize("file", CHOICES, ids=lambda file: f"{file.parent.name}={file.stem}")
def test_no_key_of_a_choice_lacks_a_fact(base: Composition, file: Path) -> None:
    composition, group = with_choice(base, file), file.parent.name
    assert [*incomplete(composition, {group: composition.values[group]})] == []


@pytest.mark.parametrize("name", RECIPES)
def test_no_key_of_a_recipe_lacks_a_fact(name: str) -> None:
    composition = compose([f"recipe={name}"])
    assert [*incomplete(composition, composition.values)] == []


@pytest.mark.parametrize("file", CHOICES, ids=lambda file: f"{file.parent.name}={file.stem}")
def test_no_quantity_lacks_a_unit(file: Path) -> None:
    """A number whose unit neither the name nor the documentation says: declare it, `Annotated[int, unit("MiB")]`."""
    group = file.parent.name
    target = target_of(read_document(file).values, PLACES[group])
    keys = signature_of(target).keys if target is not None else {}
    units = {key: unit_of(key, one.hint, doc_line(target, key)) for key, one in keys.items()}
    assert [key for key, unit in units.items() if unit is None and key not in INJECTED.get(group, ())] == []


@pytest.mark.parametrize(
    ("key", "argument", "type_", "unit", "default"),
    [
        ("checkpoint.every_s", "recipe=null", "a number or null, more than 0", "seconds", 600.0),
        ("data.path", "data=csv_table", "a path", "none", REQUIRED),
        ("optimizer.lr", "optimizer=sgd", "a number", "a plain number", 0.1),
        ("model.hidden", "model=gan", "a list of whole numbers", "units", [128, 256]),
        ("strategy.staleness.bound", "strategy=parameter_server", "a whole number or null, at least 0", "steps", None),
        ("callbacks.progress.every_s", "callbacks=[progress]", "a number, more than 0", "seconds", 5.0),
        ("hardware.memory_gb_s", "hardware=l4", "a number, more than 0", "10^9 bytes/s", 300.0),
        ("precision.value", "precision=bf16", "fp64, fp32, tf32, bf16, bf16_mixed or fp16_mixed", "none", "bf16"),
    ],
)
def test_facts_come_from_annotation_documentation_and_yaml(
    key: str, argument: str, type_: str, unit: str, default: object
) -> None:
    composition = compose(list(dict.fromkeys(["recipe=null", argument])))
    facts = facts_of(composition, tuple(key.split(".")))
    assert (facts.type, facts.unit, facts.default) == (type_, unit, default)


def test_a_class_of_the_users_needs_an_args_section_only(
    write_conf: Callable[[Mapping[str, str]], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "explained_net.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Module):\n"
        '    """A net.\n\n    Args:\n        size: Outputs of the layer.\n    """\n\n'
        "    def __init__(self, size: int = 3) -> None:\n        super().__init__()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    conf = write_conf({"model/own.yaml": "_target_: explained_net.Net\nsize: 4\n"})
    with allow_packages(["explained_net"]):
        composition = compose(["recipe=null", "model=own"], config_dirs=[conf], packages=["explained_net"])
        facts = facts_of(composition, ("model", "size"))
    assert (facts.type, facts.unit, facts.default, facts.meaning) == (
        "a whole number",
        "outputs",
        4,
        "Outputs of the layer.",
    )


def test_a_key_without_a_value_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "data.target", "recipe=null", "data=csv_table"]) == 0
    assert capsys.readouterr().out == (
        "data.target=???\n"
        "  set by   conf/data/csv_table.yaml:4\n"
        "  type     text\n"
        "  unit     none\n"
        "  default  none: it must be given\n"
        "  means    The column with the target.\n"
        "  changes  maths: changes the result\n"
    )
