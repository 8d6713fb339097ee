"""`trainkit ensemble DIR --k N`: combine the best runs of a sweep into one model, score it with its members, and write
it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.verbs.looking.top import ranked
from trainkit.verbs.support.call import Add, Call, checkpoint_flag, one_of, whole

if TYPE_CHECKING:
    from trainkit.sweeps.results.ensemble import Candidate


def add_flags(add: Add) -> None:
    """Add the flags of this verb."""
    add("--k", metavar="N", type=whole(1), help="number of the best runs to combine; 3 without it")
    add("--metric", metavar="NAME", help="the metric for the order; eval.metric of the runs without it")
    about = "whether the smallest (min) or the largest (max) value is best"
    add("--mode", metavar="MODE", type=one_of("min", "max"), help=about)
    checkpoint_flag(add)
    add("--out", metavar="FOLDER", help="the folder for the model; DIR/ensemble without it")


def run(call: Call) -> int:
    """Print members and ensemble in one table, and write the ensemble."""
    call.check_arity(arguments=1, overrides=False)
    checkpoint, out = call.flags.get("checkpoint", "last"), call.flags.get("out")
    board, count = ranked(call)
    target = Path(call.arguments[0]).expanduser() / "ensemble" if out is None else Path(out).expanduser()
    from trainkit.storage import quoted  # noqa: PLC0415 - for this only
    from trainkit.sweeps.results.ensemble import best_of, combine, export, score  # noqa: PLC0415 - imports torch
    from trainkit.trainer.ownership import free_name  # noqa: PLC0415 - for this only

    entries = best_of(board, 3 if count is None else count)
    combined = combine(entries, checkpoint=checkpoint)
    scored = score(combined, devices=_devices())
    names = list(dict.fromkeys(name for _, figures in scored for name in figures))
    folder = free_name(target)
    about = {
        "made_of": [str(entry.folder) for entry in entries],
        "checkpoint": checkpoint,
        "figures": {candidate.name: figures for candidate, figures in scored},
    }
    written = export(combined, folder, about=about)
    _report(scored, names, folder, title=f"{len(entries)} best by {board.goal}")
    sys.stdout.writelines(f"trainkit.load({quoted(place)})\n" for place in written)
    return 0


def _devices() -> list[Any]:
    import torch  # noqa: PLC0415 - not for --help

    gpus = torch.cuda.device_count()
    return [torch.device("cuda", place) for place in range(gpus)] or [torch.device("cpu")]


def _report(
    scored: Sequence[tuple[Candidate, Mapping[str, float]]], names: Sequence[str], folder: Path, *, title: str
) -> None:
    """Print the metrics and write them as a page into the folder."""
    from trainkit.files import write_atomically  # noqa: PLC0415 - not for --help
    from trainkit.report.numbers import figure  # noqa: PLC0415 - not for --help
    from trainkit.report.tables import print_rows  # noqa: PLC0415 - not for --help

    head = ("model", *names, "")
    rows = [(one.name, *(figure(figures[name]) for name in names), one.settings) for one, figures in scored]
    sys.stdout.write(f"{title}\n")
    print_rows(head, rows)
    lines = [head, (":--", *("--:" for _ in names), ":--"), *rows]
    page = "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in lines)
    write_atomically(folder / "ensemble.md", f"# Ensemble of the {title}\n\n{page}")
