"""`trainkit report RUN ...`: write the page of one run, of several runs, or of a sweep, for a browser."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from trainkit.config.grammar import refusal
from trainkit.config.schema import NO_RUN, refuse_earlier_names
from trainkit.errors import UnreadableError
from trainkit.verbs.support.call import Call, Flag

USAGE: Final = "RUN | RUN RUN ... | SWEEP"
FLAGS: Final[Mapping[str, Flag]] = {
    "out": Flag(
        help="the file to write; without it RUN/report.html, SWEEP/report.html or comparison.html", value="FILE"
    ),
}
_PAGE: Final = "report.html"


def run(call: Call) -> int:
    """Write the page, and print its path."""
    from trainkit.storage import reporting  # noqa: PLC0415 - not for --help

    call.check_arity(arguments=max(1, len(call.arguments)), overrides=False)
    folders = [Path(argument).expanduser() for argument in call.arguments]
    is_sweep = len(folders) == 1 and (folders[0] / "sweep.json").is_file()
    for folder in folders:
        if not is_sweep and not (folder / "resolved.yaml").is_file():
            raise refusal(str(folder), f"{NO_RUN} Give run folders, or one folder of a sweep.")
        with contextlib.suppress(UnreadableError):  # a page is also written of a run whose config is damaged
            refuse_earlier_names(folder / "resolved.yaml")
    out = _out(call) or (folders[0] / _PAGE if len(folders) == 1 else Path("comparison.html"))
    with reporting(out.parent):
        if is_sweep:
            _write_sweep(folders[0], out)
        elif len(folders) == 1:
            _write_run(folders[0], out)
        else:
            _write_comparison(folders, out)
    sys.stdout.write(f"{out}\n")
    return 0


def _out(call: Call) -> Path | None:
    """Return the file of `--out`.

    Raises:
        ConfigError: its folder does not exist, or the path is a folder.
    """
    if "out" not in call.flags:
        return None
    path = Path(call.flags["out"]).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        raise refusal(f"--out {path}", "must be a file in an existing folder.")
    return path


def _write_run(folder: Path, out: Path) -> None:
    from trainkit.run.folder.run_folder import RunFolder  # noqa: PLC0415 - nothing is imported to refuse an argument
    from trainkit.run.page import write_run_page  # noqa: PLC0415 - the same
    from trainkit.sweeps.results.comparing import spread_of_run  # noqa: PLC0415 - the same

    write_run_page(RunFolder(folder), out, spread=spread_of_run(folder))


def _write_comparison(folders: list[Path], out: Path) -> None:
    from trainkit.report.web.comparison_document import comparison_page  # noqa: PLC0415 - as above
    from trainkit.run.page import write_page  # noqa: PLC0415 - the same
    from trainkit.sweeps.results.comparing import compare_runs  # noqa: PLC0415 - the same

    write_page(out, comparison_page(compare_runs(folders)))


def _write_sweep(folder: Path, out: Path) -> None:
    from trainkit.sweeps.results.comparing import compare_sweep  # noqa: PLC0415 - as above
    from trainkit.sweeps.results.leaderboard import collect  # noqa: PLC0415 - the same
    from trainkit.sweeps.results.page import write_sweep_page  # noqa: PLC0415 - the same

    board = collect(folder)
    if not board.entries:
        raise refusal(str(folder), "lists no job.")
    write_sweep_page(compare_sweep(folder, board), out)
