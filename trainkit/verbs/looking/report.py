"""`trainkit report RUN ...`: write the page of runs, of a sweep or of a ledger, for a browser, or send runs."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from trainkit.config.grammar import refusal
from trainkit.config.schema import NO_RUN, refuse_earlier_names
from trainkit.errors import UnreadableError
from trainkit.files import reporting
from trainkit.report.web.comparison_document import comparison_page
from trainkit.report.web.ledger_document import ledger_page
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.folder.status import read_status
from trainkit.run.record import write_page, write_run_page
from trainkit.sweeps.results.comparing import compare_runs, compare_sweep, spread_of_run
from trainkit.sweeps.results.leaderboard import collect
from trainkit.sweeps.results.pairs import recorded
from trainkit.tracking.sending import send_later
from trainkit.verbs.support.call import Call


def run(call: Call) -> int:
    """Write the page, and print its path."""
    folders = [Path(argument).expanduser() for argument in call.arguments]
    is_ledger = len(folders) == 1 and folders[0].suffix == ".jsonl"
    is_sweep = len(folders) == 1 and (folders[0] / "sweep.json").is_file()
    for folder in () if is_ledger else folders:
        if not is_sweep and not (folder / "resolved.yaml").is_file():
            raise refusal(str(folder), f"{NO_RUN} Give run folders, or one folder of a sweep.")
        with contextlib.suppress(UnreadableError):  # a page is also written of a run whose config is damaged
            refuse_earlier_names(folder / "resolved.yaml")
    if "send" in call.flags:
        if is_ledger:
            raise refusal("--send", "sends runs, and a ledger holds none.")
        if running := [folder for folder in folders if read_status(RunFolder(folder)).is_running]:
            raise refusal(str(running[0]), "is running, and sends its rows itself.")
        return max(map(send_later, folders))
    out = folders[0] / "report.html" if len(folders) == 1 else Path("comparison.html")
    out = Path(call.flags.get("out", folders[0].with_suffix(".html") if is_ledger else out)).expanduser()
    if out.is_dir() or not out.parent.is_dir():
        raise refusal(f"--out {out}", "must be a file in an existing folder.")
    with reporting(out.parent):
        if is_ledger:
            if not (rows := recorded(folders[0])):
                raise refusal(str(folders[0]), "lists no comparison. trainkit compare A B makes one.")
            write_page(out, ledger_page(rows, str(folders[0])))
        elif is_sweep:
            board = collect(folders[0])
            if not board.entries:
                raise refusal(str(folders[0]), "lists no job.")
            write_page(out, comparison_page(compare_sweep(folders[0], board)))
        elif len(folders) == 1:
            write_run_page(RunFolder(folders[0]), out, spread=spread_of_run(folders[0]))
        else:
            write_page(out, comparison_page(compare_runs(folders)))
    sys.stdout.write(f"{out}\n")
    return 0
