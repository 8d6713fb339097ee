"""Write the pages of the docs site that are made from the code: verbs, keys, choices, the Python API."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType, MappingProxyType
from typing import Any, Final

import trainkit
from trainkit import cli, errors
from trainkit.config.described.run_schema import config_schema
from trainkit.config.schema import GROUPS
from trainkit.config.targets.choices import read_choice
from trainkit.config.yaml_files import shipped_conf
from trainkit.errors import yaml_text
from trainkit.verbs.support.table import VERBS

_FACTS: Final = re.compile(r"^(?P<meaning>.*?) ?\[(?P<facts>[^\[\]]*(?:\[.*\])?[^\[\]]*)\]$", re.DOTALL)
"""The description of a key in the schema: its meaning, and in brackets tag, unit and default."""
_API: Final = ("trainkit.testing", "trainkit.strategies.base")
"""Modules whose names are all listed."""
_IMPORT: Final = re.compile(r"^from (trainkit[\w.]*) import (.*)$", re.MULTILINE)


def pages() -> dict[str, str]:
    """Return the Markdown of each page by its file name."""
    return {"verbs.md": _verbs(), "keys.md": _keys(), "choices.md": _choices(), "api.md": _api()}


def _verbs() -> str:
    lines = ["# Verbs", "", "What `trainkit --help` and `trainkit VERB --help` print.", "", _block(_help([]))]
    for verb in VERBS:
        lines += ["", f"## {verb}", "", _block(_help([verb]))]
    return "\n".join(lines)


def _help(arguments: list[str]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = cli.main([*arguments, "--help"])
    assert code == 0, arguments
    return printed.getvalue()


def _block(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```"


def _keys() -> str:
    """Return the page of the keys that every training has."""
    definitions = config_schema()["$defs"]
    run = definitions["run"]["properties"]
    plain = {name: key for name, key in run.items() if name not in GROUPS and _section(key) is None}
    lines = [
        "# Keys",
        "",
        (
            "The keys that every training has; `trainkit explain KEY` shows the value of one, and who set it. Keys of "
            "a model, a dataset, a strategy and so on belong to [choices](choices.md). The tag says what changing "
            "a key can affect: *maths* the result, *placement* where it runs, *speed* how fast, *cosmetic* what is "
            "shown or kept ([config](../docs/config.md))."
        ),
        "",
        *_table("", plain),
    ]
    for name, key in run.items():
        if name not in GROUPS and (section := _section(key)) is not None:
            part = definitions[section]
            lines += ["", f"## {name}", "", part.get("description", ""), "", *_table(f"{name}.", part["properties"])]
    return "\n".join(lines)


def _choices() -> str:
    """Return the page of the choices of every group, each with its keys."""
    definitions = config_schema()["$defs"]
    lines = [
        "# Choices",
        "",
        (
            "A group is a folder of `conf/`, a choice one of its files: `GROUP=CHOICE` on the command line, "
            "`GROUP.KEY=VALUE` for its keys."
        ),
    ]
    for group in sorted(GROUPS):
        lines += ["", f"## {group}"]
        for file in sorted((shipped_conf() / group).glob("*.yaml")):
            lines += ["", f"### {group}={file.stem}", "", *_choice(group, file, definitions)]
    return "\n".join(lines)


def _choice(group: str, file: Path, definitions: Mapping[str, Any]) -> Iterator[str]:
    values = read_choice(file).values
    definition = definitions.get(str(values.get("_target_")))
    if definition is None:
        yield _block(file.read_text())
        return
    yield definition.get("description", "")
    yield ""
    yield f"Class: `{values['_target_']}`"
    yield ""
    keys = {name: key for name, key in definition["properties"].items() if name != "_target_"}
    yield from _table(f"{group}.", keys, values)


def _section(key: Mapping[str, Any]) -> str | None:
    """Return the class of the keys below a key; None where it holds one value."""
    name = str(key.get("$ref", "")).removeprefix("#/$defs/")
    return name if name.endswith("Config") else None


def _table(
    prefix: str, keys: Mapping[str, Mapping[str, Any]], values: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[str]:
    """Yield the lines of a table of keys; `values` of a choice's file come before the defaults of its class."""
    if not keys:
        yield "It has no keys."
        return
    yield "| key | meaning | accepts | tag, unit, default |"
    yield "|---|---|---|---|"
    for name, key in keys.items():
        meaning, facts = _split(str(key.get("description", "")))
        if name in values:
            facts = f"{facts.partition('default: ')[0]}default: {yaml_text(values[name])}"
        cells = " | ".join(map(_cell, (meaning, _accepts(key), facts)))
        yield f'| <span id="{prefix}{name}">`{prefix}{name}`</span> | {cells} |'


def _split(description: str) -> tuple[str, str]:
    match = _FACTS.match(description)
    return (match["meaning"], match["facts"]) if match else (description, "")


def _accepts(key: Mapping[str, Any]) -> str:
    """Return the accepted values in words, as an error says them."""
    if rule := key.get("patternErrorMessage"):
        return str(rule).removeprefix("must be ").rstrip(".")
    names = [str(value) for inner in _inner(key) for value in inner.get("enum", ())]
    kinds = [kind for inner in _inner(key) for kind in _kinds(inner) if "enum" not in inner]
    return ", ".join(dict.fromkeys([*names, *kinds]))


def _inner(key: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield key
    for inner in key.get("anyOf", ()):
        yield from _inner(inner)


def _kinds(key: Mapping[str, Any]) -> list[str]:
    texts = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "text",
             "array": "a list", "object": "keys and values", "null": "null"}  # fmt: skip
    kinds = key.get("type", [])
    return [texts[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds)]


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*").strip()


def documented_names() -> list[str]:
    """Return the names that the docs import from the inside, without exceptions and what is listed elsewhere."""
    texts = (page.read_text() for page in (Path(__file__).resolve().parents[2] / "docs").glob("*.md"))
    imports = [line for text in texts for line in _IMPORT.findall(text)]
    imported = {(module, name) for module, names in imports for name in names.split(", ")}
    return sorted(
        f"{module}.{name}"
        for module, name in imported
        if name not in trainkit.__all__
        and module not in _API
        and not (module == errors.__name__ and name.endswith("Error"))
    )


def _api() -> str:
    lines = ["# Python API", "", f"Version {trainkit.__version__}. `import trainkit` alone imports no torch.", ""]
    for name in sorted(trainkit.__all__):
        value = getattr(trainkit, name)
        is_listed = getattr(value, "__module__", "") in (*_API, errors.__name__)
        if isinstance(value, type | FunctionType) and not is_listed:
            lines += [f"::: {inspect.unwrap(value).__module__}.{value.__qualname__}", ""]
    for name in (*_API, *documented_names()):
        lines += [f"::: {name}", ""]
    lines += ["## Exceptions", "", "| class | exit code | means |", "|---|---|---|"]
    for name, kind in sorted(vars(errors).items()):
        if isinstance(kind, type) and issubclass(kind, errors.TrainkitError):
            means = (inspect.getdoc(kind) or "").partition("\n\n")[0]
            lines.append(f'| <span id="{name}">`{name}`</span> | {json.dumps(kind.exit_code)} | {_cell(means)} |')
    return "\n".join(lines)
