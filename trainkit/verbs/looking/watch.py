"""`trainkit watch [DIR]`: show all runs below a folder live in the terminal."""

from __future__ import annotations

from pathlib import Path

from trainkit.config.grammar import refusal
from trainkit.report.tables import terminal_console
from trainkit.verbs.support.call import Call
from trainkit.watching.board import Board
from trainkit.watching.screen import lines_of, show


def run(call: Call) -> int:
    """Show the runs until Ctrl-C; if standard output is piped, print them once. Imports no torch."""
    root = Path(call.arguments[0] if call.arguments else "outputs").expanduser()
    if not root.is_dir():
        raise refusal(str(root), "is not a folder. Give one that contains runs; without one, outputs is watched.")
    board = Board(root)
    if "json" not in call.flags and (console := terminal_console()) is not None:
        show(console, board.read)
    else:
        document = board.read()
        call.show(document, lines_of(document))
    return 0
