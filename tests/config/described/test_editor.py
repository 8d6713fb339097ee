"""A schema that a YAML language server, which editors start, cannot read is caught here alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.yaml_language_server import NOT_INSTALLED, SERVER, YamlLanguageServer, running_server
from trainkit.config.described.run_schema import config_schema

pytestmark = pytest.mark.skipif(SERVER is None, reason=NOT_INSTALLED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("editor")
    (folder / "schema.json").write_text(json.dumps(config_schema()))
    return folder


@pytest.fixture(scope="module")
def server() -> Iterator[YamlLanguageServer]:
    with running_server() as server:
        yield server


def recipe(text: str) -> str:
    return f"# yaml-language-server: $schema=schema.json\n# @package _global_\n{text}"


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("epochs: ${oc.env:E}\n", []),
        ("epohs: 3\n", ["Property epohs is not allowed."]),
        ("seed: three\n", ["must be a whole number, at least 0 and less than 9223372036854775808."]),
        ("defaults: [{override /model: gpt}]\nmodel: {width: 64}\n", []),
        ("defaults: [{override /model: gpt}]\nmodel: {hidden: [3]}\n", ["Property hidden is not allowed."]),
        ("compile: {mode: fast}\n", ['Value is not accepted. Valid values: "off", "default", "max-autotune", "step".']),
    ],
)
def test_it_flags_mistakes_alone(server: YamlLanguageServer, folder: Path, text: str, messages: list[str]) -> None:
    assert server.problems(folder, recipe(text)) == messages


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", {"epochs", "batch", "model", "defaults"}),
        ("batch:\n  ", {"global_size", "micro_size", "accumulation", "drop_last"}),
        ("defaults:\n  - override /schedule: ", {"cosine", "linear"}),
        ("model:\n  _target_: ", {"trainkit.models.Mlp"}),
    ],
)
def test_it_completes(server: YamlLanguageServer, folder: Path, text: str, words: set[str]) -> None:
    assert words <= set(server.completions(folder, recipe(text)))
