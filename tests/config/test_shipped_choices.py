"""The YAMLs that ship, against the classes they name."""

from pathlib import Path

import pytest

from trainkit.config.check import checked
from trainkit.config.compose import compose
from trainkit.config.schema import GROUPS
from trainkit.config.targets.allowed import TARGET
from trainkit.config.targets.build import GROUP_KEYS, INJECTED, resolve_target, signature_of
from trainkit.config.yaml_files import read_document, shipped_conf

FILES = sorted(shipped_conf().glob("*/*.yaml"))
NODES = [file for file in FILES if TARGET in read_document(file).values]


def ids(file: Path) -> str:
    return f"{file.parent.name}/{file.stem}"


@pytest.mark.parametrize("file", NODES, ids=ids)
def test_a_choice_lists_every_key_of_its_class_with_the_defaults(file: Path) -> None:
    values = read_document(file).values
    group = file.parent.name
    signature = signature_of(resolve_target(values[TARGET]))
    keys = {name for name in signature.keys if name not in INJECTED.get(group, ())}
    listed = set(values) - {TARGET, *GROUP_KEYS.get(group, ())}
    assert listed == keys or (signature.takes_more and listed <= keys)


@pytest.mark.parametrize("file", FILES, ids=ids)
def test_a_choice_says_in_a_line_what_it_is(file: Path) -> None:
    assert read_document(file).description


@pytest.mark.parametrize("file", FILES, ids=ids)
def test_a_choice_belongs_to_a_group_and_has_no_trap(file: Path) -> None:
    assert file.parent.name in GROUPS
    assert read_document(file).gotchas == ()


@pytest.mark.parametrize("group", ["optimizer", "schedule", "strategy"])
def test_every_choice_of_these_composes_cleanly(group: str) -> None:
    for file in sorted((shipped_conf() / group).glob("*.yaml")):
        checked(compose(["recipe=null", f"{group}={file.stem}"]))
