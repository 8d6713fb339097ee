"""A key without a type, a meaning or the right unit in `explain` is caught here alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.config.conftest import Write
from trainkit.config.compose import compose
from trainkit.config.composition import Composition, dotted, leaves
from trainkit.config.described.key_facts import REQUIRED, facts_of
from trainkit.config.schema import LIST_GROUPS
from trainkit.config.targets.allowed import allow_packages
from trainkit.config.yaml_files import read_document, shipped_conf, shipped_recipes

OPEN = {"data.train", "data.val", "data.test", "data.source", "data.val_source", "objective.teacher"}
"""Keys that take any value: a node of any class."""


def incomplete(composition: Composition, values: Mapping[str, Any]) -> Iterator[str]:
    for path, _ in leaves(values):
        facts = facts_of(composition, path)
        lacks_type = facts.type in ("", "any value") and dotted(path) not in OPEN
        if not facts.meaning or not facts.unit or lacks_type:
            yield f"{dotted(path)} {facts}"


@pytest.mark.slow
def test_no_key_of_a_choice_or_a_recipe_lacks_a_fact() -> None:
    base, found = compose(["recipe=null"]), list[str]()
    for file in sorted(shipped_conf().glob("*/*.yaml")):
        group, values = file.parent.name, read_document(file).values
        node = {file.stem: values} if group in LIST_GROUPS else values
        found += incomplete(replace(base, values={**base.values, group: node}), {group: node})  # composing takes long
    for file in shipped_recipes().glob("*/recipe.yaml"):
        composition = compose([f"recipe={file.parent.name}"])
        found += incomplete(composition, composition.values)
    assert found == []


@pytest.mark.parametrize(
    ("key", "argument", "type_", "unit", "default"),
    [
        ("data.path", "data=csv_table", "a path", "none", REQUIRED),
        ("optimizer.lr", "optimizer=sgd", "a number", "a plain number", 0.1),
        ("strategy.staleness.bound", "strategy=parameter_server", "a whole number or null, at least 0", "steps", None),
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
    write_conf: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
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
    assert (facts.type, facts.unit, facts.default) == ("a whole number", "a plain number", 4)
    assert facts.meaning == "Outputs of the layer."
