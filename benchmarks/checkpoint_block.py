"""Time that a step waits for a save in the background, as a share of a plain torch.save of the same state.

python benchmarks/checkpoint_block.py [--mib N] [--rounds N] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from benchmarks import report
from trainkit.strategies.tensor_shards import TensorShard
from trainkit.trainer.checkpoint.saving import Saver
from trainkit.trainer.manifest import Retention

_TENSORS = 48
"""Parameters and two slots of the optimizer each, of 16 layers."""


def seconds(act: Callable[[], object]) -> float:
    """Return how long a call takes."""
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def main() -> None:
    """Measure in turns, print and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="below which files are written; the result is then printed alone")
    options = parser.parse_args()
    size = options.mib * 2**20 // 4 // _TENSORS
    state = {f"param/{index}": torch.randn(size) for index in range(_TENSORS)}
    pieces = {name: (TensorShard.whole(tensor),) for name, tensor in state.items()}
    saves: dict[str, list[float]] = {"first save": [], "first save, prepared": [], "later save": []}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            plain = seconds(lambda: torch.save(state, Path(folder) / "plain.pt"))
        for prepared in (False, True):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                saver = Saver(Path(folder), retention=Retention(keep_last=1, keep_best=0))
                if prepared:
                    saver.prepare(pieces)
                    while any(thread.name == "staging" for thread in threading.enumerate()):
                        time.sleep(0.1)  # the training goes on meanwhile
                first = seconds(partial(saver.save, step=1, pieces=pieces, meta={}))
                saves["first save, prepared" if prepared else "first save"].append(first / plain)
                saver.wait()
                if prepared:
                    later = seconds(partial(saver.save, step=2, pieces=pieces, meta={}))
                    saves["later save"].append(later / plain)
                saver.close()
        print(f"torch.save {plain:.2f} s", {name: f"{ratios[-1]:.3f}" for name, ratios in saves.items()}, flush=True)
    rows = [
        [name, f"{median(ratios):.3f}", f"{min(ratios):.3f} to {max(ratios):.3f}"] for name, ratios in saves.items()
    ]
    if options.folder is not None:
        print(report.table(["", "median of the ratios", "range"], rows))
        return
    report.write(
        "checkpoint_block",
        "Time that a step waits for a checkpoint",
        f"python benchmarks/checkpoint_block.py --mib {options.mib} --rounds {options.rounds}",
        f"A state of {options.mib} MiB on a CPU. Seconds of the call that saves in the background over those of a "
        "plain torch.save of the same round.\n\n" + report.table(["", "median of the ratios", "range"], rows),
    )


if __name__ == "__main__":
    main()
