"""`trainkit schema NAME`: print the JSON schema of the config, of a JSON output, or of a JSON file of a run."""

from __future__ import annotations

import importlib
import sys
from typing import Any, Final

from trainkit.config.annotations import document_schema
from trainkit.config.described.run_schema import config_schema
from trainkit.config.grammar import refusal
from trainkit.config.values import nearest
from trainkit.report.json_output import print_json
from trainkit.report.schemas import DOCUMENTS
from trainkit.verbs.support.call import Call

_CONFIG: Final = "config"
_ABOUT: Final = "your YAML files: an editor uses it to complete and check them"


def run(call: Call) -> int:
    """Print a schema, or without a name the list of all schemas."""
    names = {_CONFIG: _ABOUT, **{name: document.about for name, document in DOCUMENTS.items()}}
    if not call.arguments:
        width = max(map(len, names))
        sys.stdout.writelines(f"{name:<{width}}  {about}\n" for name, about in names.items())
        return 0
    name = call.arguments[0]
    if name not in names:
        raise refusal(name, f"no such schema. {nearest(name, names)}")
    print_json(config_schema(call.config_dirs) if name == _CONFIG else schema_of(name))
    return 0


def schema_of(name: str) -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a document.

    Args:
        name: its name in `trainkit.report.schemas.DOCUMENTS`.

    Example:
        >>> schema_of("diff")["properties"]["can_change_result"]["type"]
        'integer'
    """
    document = DOCUMENTS[name]
    module, _, kind = document.kind.rpartition(".")
    described = getattr(importlib.import_module(module), kind)
    return document_schema(described, title=document.about, version=document.version, is_open=document.is_open)
