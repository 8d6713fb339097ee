"""`trainkit diff A B`: print the differences of two runs, first the differences that can change the result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from trainkit.config.grammar import refusal
from trainkit.config.identity import Difference, difference
from trainkit.config.schema import RunConfig, load_resolved
from trainkit.errors import yaml_text
from trainkit.verbs.support.call import Call


def run(call: Call) -> int:
    """Print the differences; return 1 if one can change the result."""
    left, right = (_run_at(argument) for argument in call.arguments)
    differences = difference(left, right)
    matter = sum(item.matters for item in differences)
    changes = [{**asdict(item), "tag": item.tag.value} for item in differences]
    call.show({"version": 1, "differences": changes, "can_change_result": matter}, _lines(differences, matter))
    return int(matter > 0)


def _lines(differences: Sequence[Difference], matter: int) -> Iterator[str]:
    width = max((len(item.key) for item in differences), default=0)
    for item in differences:
        yield f"{item.tag.value:<9}  {item.key:<{width}}  {yaml_text(item.left)} -> {yaml_text(item.right)}"
    if not differences:
        yield "no difference"
    elif matter:
        yield f"{matter} of {len(differences)} can change the result"
    else:
        yield "none can change the result beyond rounding"


def _run_at(argument: str) -> RunConfig:
    path = Path(argument).expanduser()
    file = path / "resolved.yaml" if path.is_dir() else path
    if not file.is_file():
        raise refusal(argument, "is neither a run folder nor a resolved.yaml.")
    return load_resolved(file)
