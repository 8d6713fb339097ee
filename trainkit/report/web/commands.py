"""Build the commands on a page: to repeat a run, and to continue it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trainkit.config.commands import shell_word
from trainkit.redaction import mask
from trainkit.report.web.page import printable

LONGEST: Final = 2_000
"""Largest number of characters of a command."""


def repeating_command(environment: Mapping[str, Any]) -> str:
    """Return the command that repeats a run, from its `environment.json`; empty if no file has it.

    Of a run that later commands have continued, it is the command that began it.

    Example:
        >>> repeating_command({"argv": ["/usr/bin/trainkit", "recipe=digits", "callbacks=[]"]})
        "trainkit recipe=digits 'callbacks=[]'"
        >>> repeating_command({"argv": ["/usr/bin/trainkit", "resume", "run"]})
        ''
    """
    found = (environment.get("begun") or environment).get("argv")
    argv = [text for text in found if isinstance(text, str)] if isinstance(found, list) else []
    if not argv:
        return ""
    is_ours = Path(argv[0]).name in ("trainkit", "__main__.py")
    if is_ours and argv[1:2] == ["resume"]:
        return ""
    program = "trainkit" if is_ours else f"python {shlex.quote(argv[0])}"
    return printable_command(" ".join([program, *map(shell_word, argv[1:])]))


def printable_command(command: str) -> str:
    """Return a command for a page: without secrets, and shortened if it is too long."""
    return printable(mask(command), LONGEST)
