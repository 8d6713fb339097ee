"""`trainkit ls [GROUP [CHOICE] | RUNS]`: the available choices and the keys of each, or the runs of a folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from trainkit.config.paths import shipped_conf, shipped_recipes
from trainkit.config.values import closest
from trainkit.config.yaml_documents import Document, read_document, shown_text
from trainkit.errors import ConfigError, Problem
from trainkit.verbs.support.call import Call, Flag

USAGE: Final = "[GROUP [CHOICE] | RUNS]"
FLAGS: Final[Mapping[str, Flag]] = {}


def run(call: Call) -> int:
    """Print groups, the choices of a group, a choice, or the runs below a folder; import no torch."""
    call.check_arity(arguments=min(len(call.arguments), 2), overrides=False)
    groups = _groups(call)
    if not call.arguments:
        _print_groups(groups)
        return 0
    group = call.arguments[0]
    if group not in groups and len(call.arguments) == 1 and (folder := Path(group).expanduser()).is_dir():
        from trainkit.verbs.support.runs import list_runs  # noqa: PLC0415 - most calls list choices

        return list_runs(folder)
    if group not in groups:
        raise _unknown(group, "no such group.", groups)
    choices = groups[group]
    if len(call.arguments) == 1:
        _print_table([(name, document.description) for name, document in choices.items()])
        return 0
    if call.arguments[1] not in choices:
        raise _unknown(f"{group}={call.arguments[1]}", "no such choice.", choices)
    sys.stdout.write(shown_text(choices[call.arguments[1]], group))
    return 0


def _groups(call: Call) -> dict[str, dict[str, Document]]:
    """Return group -> choice -> file; the user's own folders come first."""
    found: dict[str, dict[str, Document]] = {}
    for folder in (*call.config_dirs, shipped_conf()):
        for file in sorted(folder.glob("*/*.yaml")):
            _add(found, file.parent.name, file.stem, file)
    for file in sorted(shipped_recipes().glob("*/recipe.yaml")):
        _add(found, "recipe", file.parent.name, file)
    return {group: dict(sorted(found[group].items())) for group in sorted(found)}


def _add(found: dict[str, dict[str, Document]], group: str, name: str, file: Path) -> None:
    choices = found.setdefault(group, {})
    if name in choices:
        return
    try:
        choices[name] = read_document(file)
    except ConfigError as error:
        # One broken file must not keep the others from being listed.
        sys.stderr.write(f"{error.problems[0]}\n")


def _print_groups(groups: Mapping[str, Mapping[str, Document]]) -> None:
    _print_table([(group, ", ".join(choices)) for group, choices in groups.items()])
    sys.stdout.write("\nChoose with group=choice. `trainkit ls GROUP` says what each is, `ls GROUP CHOICE` its keys.\n")


def _print_table(rows: list[tuple[str, str]]) -> None:
    width = max((len(name) for name, _ in rows), default=0)
    for line in _lines(rows, width):
        sys.stdout.write(f"{line}\n")


def _lines(rows: list[tuple[str, str]], width: int) -> Iterator[str]:
    yield from (f"{name:<{width}}  {text}".rstrip() for name, text in rows)


def _unknown(name: str, rule: str, known: Mapping[str, object]) -> ConfigError:
    near = closest(name.rpartition("=")[2], known)
    hint = f"Did you mean {near}?" if near else f"There are: {', '.join(known)}."
    return ConfigError([Problem(key=name, rule=f"{rule} {hint}", origin="command line")])
