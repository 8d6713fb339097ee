"""`trainkit watch [DIR]`: show all runs below a folder live in the terminal; with `--serve`, in a browser of this
machine.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from trainkit.config.values import whole_number
from trainkit.errors import ConfigError, Problem
from trainkit.report.json_output import print_json
from trainkit.report.tables import terminal_console
from trainkit.verbs.support.call import JSON_FLAG, Call, Flag
from trainkit.watching.board import Board
from trainkit.watching.screen import lines_of, show

USAGE: Final = "[DIR]"
FLAGS: Final[Mapping[str, Flag]] = {
    "serve": Flag(help="show the runs in a browser of this machine, at an address with a token"),
    "port": Flag(help="with --serve: the port on 127.0.0.1; a free one without it", value="N"),
    "json": JSON_FLAG,
}


def run(call: Call) -> int:
    """Show the runs until Ctrl-C; if standard output is piped, print them once. Imports no torch."""
    call.check_arity(arguments=min(len(call.arguments), 1), overrides=False)
    root = Path(call.arguments[0] if call.arguments else "outputs").expanduser()
    port = _port(call.flags)
    if not root.is_dir():
        rule = "is not a folder. Give one that contains runs; without one, outputs is watched."
        raise ConfigError([Problem(key=str(root), rule=rule, origin="command line")])
    board = Board(root)
    if "json" in call.flags:
        print_json(board.read())
    elif "serve" in call.flags:
        _serve(board, port)
    elif (console := terminal_console()) is not None:
        show(console, board.read)
    else:
        sys.stdout.writelines(f"{line}\n" for line in lines_of(board.read()))
    return 0


def _serve(board: Board, port: int) -> None:
    from trainkit.watching.server import serving  # noqa: PLC0415 - for --serve only

    try:
        with serving(board.read, port=port) as server:
            sys.stdout.write(f"{server.url}\n")
            sys.stdout.flush()
            threading.Event().wait()  # until Ctrl-C
    except OSError as error:
        rule = f"cannot be served on: {error.strerror}. Give another one, or leave it out."
        raise ConfigError([Problem(key=f"--port {port}", rule=rule, origin="command line")]) from None


def _port(flags: Mapping[str, str]) -> int:
    text = flags.get("port")
    problems = []
    port = 0 if text is None else whole_number(text, low=1, high=65_535)
    if port is None:
        problems.append(Problem(key=f"--port {text}", rule="must be a whole number from 1 to 65535."))
    if text is not None and "serve" not in flags:
        problems.append(Problem(key="--port", rule="has no effect without --serve."))
    if "serve" in flags and "json" in flags:
        problems.append(Problem(key="--json", rule="prints the runs once. Leave out --serve."))
    if problems:
        raise ConfigError(problems)
    return port or 0
