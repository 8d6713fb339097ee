"""Measure every figure that README quotes beside its peers, and write its table anew: one table, one day, one command.

    python benchmarks/all.py [--rounds 5] [--quick] [--only ROW ...] [--out FOLDER]

The contenders of a row take turns within a round, and a ratio is taken within a round, so that a temporarily slower
machine affects both sides; the median over rounds is reported with its extremes. Packages of peers that are not
installed are said below the table. Rows whose machine is not this one (GPUs) stay as they are, with their day.

`--quick` tries the script: one round of a few steps, a table on the screen, and nothing is written. Without it the
table in README is written, in which rows that were not measured (`--only`) stay, and, of all rows, `results/all.md`.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from benchmarks import compiling, memory, overhead, peers, report, scaling, startup
from benchmarks.pair import WORKLOADS

README: Final = ROOT / "README.md"
PEERS: Final = {"lightning": "Lightning", "accelerate": "Accelerate", "keras": "Keras", "tensorflow": "Keras"}
OURS: Final = "trainkit"
BASE: Final = "base"
FLOOR: Final = compiling.FLOOR
"""What a ratio of a small model comes to at least on this processor, unless the step is compiled."""
PLAIN: Final = "two plain loops without exchange, each with half of a batch"
"""The most that two processes reach on this machine."""

Contender = Callable[[], float]
"""Measures once, in the unit of its row."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table."""

    key: str
    what: str
    """What is measured."""
    by: str
    """What it is divided by."""
    contenders: Mapping[str, Contender]
    """The base, trainkit, and the others, by the same base."""
    inverse: bool = False
    """Whether a ratio is that of speeds: the base's time over the contender's."""
    rounds: int | None = None
    """Rounds at most, for figures that hardly vary."""


def rows(*, quick: bool) -> list[Row]:
    """Return the rows that this machine can measure."""
    epochs = 2 if quick else 40
    stepping = {name: partial(loop, epochs) for name, loop in peers.available().items()}
    by_hand = stepping.pop(overhead.BY_HAND)
    step_loops = {name: partial(overhead.trainkit(choice), epochs) for name, choice in overhead.OURS.items()}
    in_memory = next(iter(step_loops.values()))
    map_style = {BASE: compiling.BY_HAND, OURS: compiling.MAP_STYLE, FLOOR: compiling.MAP_STYLE_FLOOR}
    turns = (3, 2, 1) if quick else None
    loop = "a hand-written PyTorch loop with a DataLoader"
    first = [*startup.OURS, *startup.FIRST_STEP]
    bare = [sys.executable, str(ROOT / "benchmarks/bare.py")]
    return [
        Row(
            key="in_memory", what="time of a step, digits MLP, dataset in memory", by=loop,
            contenders={BASE: by_hand, OURS: in_memory, **stepping, FLOOR: partial(overhead.floor, epochs)},
        ),
        Row(
            key="map_style", what="processor time of a step and its reading, digits MLP, a map-style dataset", by=loop,
            contenders={name: partial(compiling.apart, "digits", kind, turns) for name, kind in map_style.items()},
        ),
        *(_compiled(key, quick=quick) for key in ("digits", "convnet", "gpt")),
        Row(
            key="start", what="time from launch to the first finished step", by="a bare PyTorch script",
            contenders={BASE: partial(startup.seconds, [*bare, "0"]), OURS: partial(startup.seconds, first)},
        ),
        Row(
            key="peak", what="peak memory of the process", by="the bare script", rounds=3,
            contenders={BASE: partial(memory.peak_mib, [*bare, str(epochs)]), OURS: partial(
                memory.peak_mib, [sys.executable, "-m", "trainkit", f"epochs={epochs}", "hydra.run.dir=run"])},
        ),
        _two_processes("convnet", "a small convnet", quick=quick),
        _two_processes("gpt", "a small GPT", quick=quick),
    ]  # fmt: skip


def _compiled(key: str, *, quick: bool) -> Row:
    """Return the row of an eager and a compiled step on one thread, in processor time."""
    turns, last = (3, 2, 1) if quick else None, ", channels_last" if key == "convnet" else ""
    named = {BASE: compiling.BY_HAND, OURS: f"{compiling.EAGER}{last}", "trainkit compiled": f"compile.mode=step{last}"}
    if key == "digits":
        named[FLOOR] = FLOOR
    if key == "gpt":
        named["trainkit in bf16_mixed"] = compiling.BF16
    title = {"digits": "digits MLP", "convnet": f"a small convnet{last}", "gpt": "a small GPT"}[key]
    return Row(
        key=f"step_{key}", what=f"processor time of a step, {title}", by="a hand-written loop",
        contenders={name: partial(compiling.apart, key, variant, turns) for name, variant in named.items()},
    )  # fmt: skip


def _two_processes(key: str, what: str, *, quick: bool) -> Row:
    """Return the row of the speed of two processes, and of the most that this machine gives them."""
    workload = WORKLOADS[key]
    steps = 3 * workload.window if quick else workload.steps
    measures: dict[str, scaling.Measure] = {
        BASE: scaling.peer("by_hand", 1),
        OURS: scaling.trainkit("strategy=mirrored", "strategy.replicas=2"),
        "one process of trainkit": scaling.trainkit("strategy=one_device"),
        "DDP": scaling.peer("ddp", 2),
        PLAIN: scaling.peer("by_hand", 2),
    }
    return Row(
        key=f"two_{key}", what=f"speed of two processes, {what}", by="a plain loop in one process",
        contenders={name: partial(measured, workload, steps) for name, measured in measures.items()}, inverse=True,
    )  # fmt: skip


def measure(row: Row, rounds: int) -> dict[str, list[float]]:
    """Return the figures of all contenders, which take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in row.contenders}
    for number in range(min(rounds, row.rounds or rounds)):
        for name, contender in row.contenders.items():
            seconds[name].append(contender())
            print(f"{row.key}, round {number + 1}: {name}: {seconds[name][-1]:.4g}", file=sys.stderr, flush=True)
    return seconds


def ratios(row: Row, seconds: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return the ratios of each contender that is no base, a figure for each round.

    Example:
        >>> row = Row(key="x", what="", by="", contenders={}, inverse=True)
        >>> ratios(row, {"base": [2.0, 4.0], "trainkit": [1.0, 1.0]})
        {'trainkit': [2.0, 4.0]}
    """
    return {
        name: [b / a if row.inverse else a / b for a, b in zip(values, seconds[BASE], strict=True)]
        for name, values in seconds.items()
        if name != BASE
    }


def cells(row: Row, shares: Mapping[str, Sequence[float]], command: str) -> list[str]:
    """Return the cells of a row of README."""
    others = ", ".join(f"{name} {statistics.median(values):.2f}" for name, values in shares.items() if name != OURS)
    day = datetime.now(tz=UTC).date().isoformat()
    return [row.what, row.by, f"{statistics.median(shares[OURS]):.2f}", others, f"{command}, {day}"]


_HEAD: Final = "| what | divided by | trainkit | others, by the same | command, day |\n|---|---|---|---|---|\n"


def rewritten(text: str, measured: Sequence[Sequence[str]], *, absent: str) -> str:
    r"""Return README with these rows in the place of those with the same subject; new ones come first, others stay.

    Example:
        >>> old = _HEAD + "| a | b | 1 | | x |\n| c | d | 2 | | y |\n\nText.\n"
        >>> print(rewritten(old, [["a", "b", "0.5", "", "z"]], absent=""))
        | what | divided by | trainkit | others, by the same | command, day |
        |---|---|---|---|---|
        | a | b | 0.5 |  | z |
        | c | d | 2 | | y |
        <BLANKLINE>
        Text.
        <BLANKLINE>
    """
    before, _, tail = text.partition(_HEAD)
    table, _, after = tail.partition("\n\n")
    written = {row[0]: f"| {' | '.join(row)} |" for row in measured}
    unchanged = [written.pop(line.split("|")[1].strip(), line) for line in table.splitlines()]
    lines = [*written.values(), *unchanged]
    after = re.sub(r"\ANot installed.*?\n\n", "", after, flags=re.DOTALL)
    return f"{before}{_HEAD}" + "\n".join(lines) + "\n\n" + (f"{absent}\n\n" if absent else "") + after


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of a few steps; writes nothing")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="some of the rows, by their key")
    options = parser.parse_args()
    torch.set_num_threads(1)
    every_row = rows(quick=options.quick)
    if unknown := {*(options.only or ())} - {row.key for row in every_row}:
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(row.key for row in every_row)}")
    chosen = [row for row in every_row if options.only is None or row.key in options.only]
    rounds, start = 1 if options.quick else options.rounds, time.monotonic()
    missing = dict.fromkeys(name for package, name in PEERS.items() if find_spec(package) is None)
    absent = f"Not installed where this was measured, and so not in it: {', '.join(missing)}." if missing else ""
    command = f"`benchmarks/all.py --rounds {rounds}`"
    table, details = [], []
    for row in chosen:
        seconds = measure(row, rounds)
        shares = ratios(row, seconds)
        table.append(cells(row, shares, command))
        for name, values in shares.items():
            details.append([row.key, name, f"{statistics.median(seconds[name]):.4g}", _spread(values)])
    head = ["what", "divided by", "trainkit", "others, by the same", "command, day"]
    body = report.table(head, table) + f"\n\n{absent}\n\n" + report.table(["row", "", "figure", "ratio"], details)
    took = f"{(time.monotonic() - start) / 60:.0f} minutes, load {os.getloadavg()[0]:.1f} at the end."
    print(f"{body}\n\n{took}")
    if options.quick:
        return
    if options.only is None:
        report.write("all", "Every figure of README's table", command.strip("`"), f"{body}\n\n{took}")
    README.write_text(rewritten(README.read_text(), table, absent=absent))


def _spread(shares: Sequence[float]) -> str:
    return f"**{statistics.median(shares):.2f}** ({min(shares):.2f} to {max(shares):.2f})"


if __name__ == "__main__":
    main()
