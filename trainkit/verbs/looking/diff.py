"""`trainkit diff A B`: print the differences of two runs, first the differences that can change the result."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from trainkit.config.grammar import refusal
from trainkit.config.schema import RunConfig, load_resolved
from trainkit.errors import yaml_text
from trainkit.report.json_output import print_json
from trainkit.verbs.support.call import Add, Call, json_flag


def add_flags(add: Add) -> None:
    """Add the flags of this verb."""
    json_flag(add)


def run(call: Call) -> int:
    """Print the differences; return 1 if one can change the result."""
    from trainkit.config.identity import difference  # noqa: PLC0415 - imports the targets

    call.check_arity(arguments=2, overrides=False)
    left, right = (_run_at(argument) for argument in call.arguments)
    differences = difference(left, right)
    matter = sum(item.matters for item in differences)
    if "json" in call.flags:
        changes = [{**asdict(item), "tag": item.tag.value} for item in differences]
        print_json({"version": 1, "differences": changes, "can_change_result": matter})
        return 1 if matter else 0
    if not differences:
        sys.stdout.write("no difference\n")
    width = max((len(item.key) for item in differences), default=0)
    for item in differences:
        change = f"{yaml_text(item.left)} -> {yaml_text(item.right)}"
        sys.stdout.write(f"{item.tag.value:<9}  {item.key:<{width}}  {change}\n")
    if differences:
        verdict = "can change the result" if matter else "none can change the result beyond rounding"
        sys.stdout.write(f"{matter} of {len(differences)} {verdict}\n" if matter else f"{verdict}\n")
    return 1 if matter else 0


def _run_at(argument: str) -> RunConfig:
    path = Path(argument).expanduser()
    file = path / "resolved.yaml" if path.is_dir() else path
    if not file.is_file():
        raise refusal(argument, "is neither a run folder nor a resolved.yaml.")
    return load_resolved(file)
