"""Convert the output of a program to a terminal into the lines that were visible there."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Final

_TOKEN: Final = re.compile(
    r"\x1b\[(?P<numbers>[0-?]*)[ -/]*(?P<command>[@-~])"  # cursor movements, colours
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\)"  # titles, links
    r"|\x1b[^\[\]PX^_]"
    r"|(?P<control>[\r\n\b\t])"
    r"|(?P<text>[^\x00-\x1f\x7f-\x9f]+)",
    re.DOTALL,
)
_UNFINISHED: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b]*\x1b?)?\Z")
"""An incomplete sequence, whose end is in the next piece of text."""
_REORDERING: Final = re.compile("[\u202a-\u202e\u2066-\u2069]")
"""Characters that make a terminal show a line in another order than it is written."""
_LONGEST_SEQUENCE: Final = 4096
_LONGEST_LINE: Final = 1 << 14
_MOST_ROWS: Final = 200
_LIVE_S: Final = 2.0
"""How long after an upward movement of the cursor the lines within its reach may still change."""


class ScreenText:
    r"""The last rows of a terminal, which may still change; earlier rows are final.

    A row that is redrawn (a carriage return, a cursor that moves up) counts once, in its last form. Memory and the
    lines of a redrawn table are bounded.

    Example:
        >>> screen = ScreenText()
        >>> screen.feed("10 %\r20 %\r"), screen.feed("\x1b[32mdone\x1b[0m\nnext")
        ([], ['done'])
        >>> screen.finish()
        ['next']
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rows = [""]
        self._at = 0
        self._column = 0
        self._held = 0
        """Rows above the last one that a redrawn table may change."""
        self._moved_up = -float("inf")
        self._unfinished = ""

    def feed(self, text: str) -> list[str]:
        """Process written text; return the final lines, without control characters."""
        if self._held and self._clock() - self._moved_up > _LIVE_S:
            self._held = 0
        lines = self._done()
        text = self._unfinished + text
        tail = _UNFINISHED.search(text, max(0, len(text) - _LONGEST_SEQUENCE))
        self._unfinished = text[tail.start() :] if tail else ""
        for token in _TOKEN.finditer(text, 0, tail.start() if tail else len(text)):
            if token["text"] is not None:
                self._put(_REORDERING.sub("", token["text"]))
            elif token["control"] is not None:
                self._control(token["control"])
            elif token["command"] is not None:
                self._command(token["command"], token["numbers"])
            lines += self._done()
        return lines

    def finish(self) -> list[str]:
        """Return the remaining rows, and reset the screen."""
        rows = self._rows
        self._rows, self._at, self._column, self._held, self._unfinished = [""], 0, 0, 0, ""
        while rows and not rows[-1]:
            rows.pop()
        return [row.rstrip() for row in rows]

    def _done(self) -> list[str]:
        lines = []
        while (len(self._rows) - 1 > self._held and self._at > 0) or len(self._rows) > _MOST_ROWS:
            lines.append(self._rows.pop(0).rstrip())
            self._at = max(0, self._at - 1)
        if len(self._rows[self._at]) > _LONGEST_LINE:
            lines.append(self._rows[self._at])
            self._rows[self._at], self._column = "", 0
        return lines

    def _put(self, text: str) -> None:
        row, end = self._rows[self._at], self._column + len(text)
        self._rows[self._at] = row[: self._column].ljust(self._column) + text + row[end:]
        self._column = end

    def _control(self, character: str) -> None:
        if character == "\n":
            self._at, self._column = self._at + 1, 0
            if self._at == len(self._rows):
                self._rows.append("")
        elif character == "\r":
            self._column = 0
        elif character == "\b":
            self._column = max(0, self._column - 1)
        else:
            self._put(" " * (8 - self._column % 8))

    def _command(self, command: str, numbers: str) -> None:
        first = numbers.partition(";")[0]
        number = int(first) if first.isdecimal() and len(first) < 6 else 0
        row = self._rows[self._at]
        if command == "A":  # up
            wanted = max(1, number)
            self._held = min(max(self._held, wanted), _MOST_ROWS - 1)
            self._moved_up = self._clock()
            self._at = max(0, self._at - wanted)
        elif command == "B":  # down
            self._at = min(len(self._rows) - 1, self._at + max(1, number))
        elif command == "G":  # to a column
            self._column = min(max(1, number), _LONGEST_LINE) - 1
        elif command == "K":  # erase in the row
            kept = {0: row[: self._column], 1: row[self._column :].rjust(len(row))}
            self._rows[self._at] = kept.get(number, "")
        elif command == "J":  # erase below, or all
            self._rows[self._at] = row[: self._column] if number == 0 else ""
            del self._rows[self._at + 1 :]
