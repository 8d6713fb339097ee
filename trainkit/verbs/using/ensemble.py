"""`trainkit ensemble DIR --k N`: combine the best runs of a sweep into one model, score it with its members, and write
it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from trainkit.config.identity import run_config
from trainkit.files import quoted, write_atomically
from trainkit.report.numbers import figure
from trainkit.report.tables import print_rows
from trainkit.sweeps.results.ensemble import Candidate, best_of, combine, export, score
from trainkit.trainer.ownership import free_name
from trainkit.verbs.looking.top import ranked
from trainkit.verbs.support.call import Call


def run(call: Call) -> int:
    """Print members and ensemble in one table, and write the ensemble."""
    checkpoint, out = call.flags.get("checkpoint", "last"), call.flags.get("out")
    board, count = ranked(call, folds=False)
    target = Path(call.arguments[0]).expanduser() / "ensemble" if out is None else Path(out).expanduser()

    entries = best_of(board, 3 if count is None else count)
    candidates, gpus = combine(entries, checkpoint=checkpoint), torch.cuda.device_count()
    devices = [torch.device("cuda", index) for index in range(gpus)] or [torch.device("cpu")]
    scored = score(candidates, run_config(entries[0].folder), devices=devices)
    names = list(dict.fromkeys(name for _, figures in scored for name in figures))
    folder = free_name(target)
    about = {
        "made_of": [str(entry.folder) for entry in entries],
        "checkpoint": checkpoint,
        "figures": {candidate.name: figures for candidate, figures in scored},
    }
    paths = export(candidates, folder, about=about)
    _report(scored, names, folder, title=f"{len(entries)} best by {board.goal}")
    sys.stdout.writelines(f"trainkit.load({quoted(path)})\n" for path in paths)
    return 0


def _report(
    scored: Sequence[tuple[Candidate, Mapping[str, float]]], names: Sequence[str], folder: Path, *, title: str
) -> None:
    """Print the metrics and write them as a page into the folder."""
    head = ("model", *names, "")
    rows = [(model.name, *(figure(figures[name]) for name in names), model.settings) for model, figures in scored]
    sys.stdout.write(f"{title}\n")
    print_rows(head, rows)
    lines = [head, (":--", *("--:" for _ in names), ":--"), *rows]
    page = "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in lines)
    write_atomically(folder / "ensemble.md", f"# Ensemble of the {title}\n\n{page}")
