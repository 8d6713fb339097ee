"""Measure how long a save in the background keeps a GPU from its next update, and whether the copy is torn.

    python -m benchmarks.gpu.save --gib 18 --device cuda --folder FOLDER

Each line of the output is JSON, for each save first `late_s`, the seconds that the update after it was late, then
`is_whole`, whether the checkpoint holds the numbers from before that update.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from benchmarks.gpu.bench import Bench, Row, failed, verdict
from trainkit.strategies.tensor_shards import TensorShard
from trainkit.trainer.checkpoint.saving import Saver
from trainkit.trainer.checkpoint.snapshot import Snapshot
from trainkit.trainer.checkpoint.tensors import load
from trainkit.trainer.manifest import Retention

_TENSORS = 48
"""Parameters and two slots of the optimizer each, of 16 layers."""
LIMIT_S = 1.0
"""Seconds that a save of 18 GB may keep the training."""


def saves(bench: Bench) -> Iterator[Row]:
    """Save in the background, and update all tensors at once."""
    gib, device = (0.125, "cpu") if bench.small else (18.0, "cuda")
    title = f"save of {gib:g} GiB"
    with tempfile.TemporaryDirectory() as folder:
        done = bench.run("-m", "benchmarks.gpu.save", "--gib", str(gib), "--device", device, "--folder", folder)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    late, whole = ([line[key] for line in lines if key in line] for key in ("late_s", "is_whole"))
    if late:
        judged, target = bench.judged(max(late), most=LIMIT_S)
        shown = ", ".join(f"{seconds:.2f}" for seconds in late)
        yield f"{title}: the next update is late", judged, f"{shown} s ({target} s)"
    second = f"{title}: holds the numbers from before it"
    if whole:
        yield second, verdict(all(whole)), f"saves that were read: {len(whole)}"
    if done.returncode:
        yield failed(title if whole else second, done)


def measured(gib: float, device: torch.device, folder: Path) -> Iterator[dict[str, Any]]:
    """Save twice; yield how late each update was, and whether each checkpoint is of one moment."""
    size = int(gib * 2**30) // 4 // _TENSORS
    state = {f"param/{index}": torch.zeros(size, device=device) for index in range(_TENSORS)}
    snapshot = Snapshot()
    saver = Saver(folder, retention=Retention(keep_last=1, keep_best=0), snapshot=snapshot)
    pieces = {name: (TensorShard.whole(tensor),) for name, tensor in state.items()}
    saver.prepare(pieces)
    snapshot.wait_prepared()  # a training computes for longer before its first save
    update(state, device)
    plain = min(timed_update(state, device) for _ in range(3))
    for step in range(2):
        before = float(state["param/0"][0])
        start = time.perf_counter()
        saver.save(step=step, pieces=pieces, meta={})
        update(state, device)
        yield {"late_s": time.perf_counter() - start - plain}
        saver.wait()
        tensors = load(saver.finished()[-1].folder).tensors
        some = (*list(state)[:2], *list(state)[-2:])
        yield {"is_whole": all(bool((tensors[name] == before).all()) for name in some)}
    saver.close()


def timed_update(state: dict[str, torch.Tensor], device: torch.device) -> float:
    """Return the seconds of an update."""
    start = time.perf_counter()
    update(state, device)
    return time.perf_counter() - start


def update(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Change every tensor, and wait for the device."""
    torch._foreach_add_(list(state.values()), 1.0)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Measure, and print each result as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=18.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    for result in measured(options.gib, torch.device(options.device), options.folder):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
