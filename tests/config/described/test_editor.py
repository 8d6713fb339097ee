"""A schema that a YAML language server, which editors start, cannot read is caught here alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.yaml_language_server import NOT_INSTALLED, SERVER, running_server
from trainkit.config.described.run_schema import config_schema

pytestmark = pytest.mark.skipif(SERVER is None, reason=NOT_INSTALLED)


def test_an_editor_flags_a_mistake_and_completes_keys_and_choices(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(config_schema()))
    head = "# yaml-language-server: $schema=schema.json\n# @package _global_\n"
    with running_server() as server:
        for text, messages in (
            ("epochs: ${oc.env:E}\n", []),
            ("epohs: 3\n", ["Property epohs is not allowed."]),
            ("seed: three\n", ["must be a whole number, at least 0 and less than 9223372036854775808."]),
            ("defaults: [{override /model: gpt}]\nmodel: {hidden: [3]}\n", ["Property hidden is not allowed."]),
        ):
            assert server.problems(tmp_path, f"{head}{text}") == messages
        assert {"epochs", "model", "defaults"} <= {*server.completions(tmp_path, head)}
        assert {"cosine"} <= {*server.completions(tmp_path, f"{head}defaults:\n  - override /schedule: ")}
