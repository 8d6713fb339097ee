"""`trainkit watch [DIR]`: show all runs below a folder live in the terminal."""

from __future__ import annotations

import sys
from pathlib import Path

from trainkit.config.grammar import refusal
from trainkit.report.json_output import print_json
from trainkit.report.tables import terminal_console
from trainkit.verbs.support.call import Add, Call, json_flag
from trainkit.watching.board import Board
from trainkit.watching.screen import lines_of, show


def add_flags(add: Add) -> None:
    """Add the flags of this verb."""
    json_flag(add)


def run(call: Call) -> int:
    """Show the runs until Ctrl-C; if standard output is piped, print them once. Imports no torch."""
    call.check_arity(arguments=min(len(call.arguments), 1), overrides=False)
    root = Path(call.arguments[0] if call.arguments else "outputs").expanduser()
    if not root.is_dir():
        raise refusal(str(root), "is not a folder. Give one that contains runs; without one, outputs is watched.")
    board = Board(root)
    if "json" in call.flags:
        print_json(board.read())
    elif (console := terminal_console()) is not None:
        show(console, board.read)
    else:
        sys.stdout.writelines(f"{line}\n" for line in lines_of(board.read()))
    return 0
