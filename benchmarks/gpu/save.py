"""Measure how long a save in the background keeps a GPU from its next update, and whether the copy is torn.

    python benchmarks/gpu/save.py --gib 18 --device cuda --folder FOLDER

The last line of the output is JSON: seconds that the update after a save was late, and whether the checkpoint holds the
numbers from before that update.
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

from benchmarks.gpu.bench import Bench, Row, end_of, verdict
from trainkit.trainer.checkpoint import BackgroundSaver, Retention, SavePolicy, load

_TENSORS = 48
"""Parameters and two slots of the optimizer each, of 16 layers."""
LIMIT_S = 1.0
"""Seconds that a save of 18 GB may keep the training."""


def saves(bench: Bench) -> Iterator[Row]:
    """Save in the background, and update all tensors at once."""
    gib, device = (0.125, "cpu") if bench.small else (18.0, "cuda")
    title = f"save of {gib:g} GiB"
    with tempfile.TemporaryDirectory() as folder:
        done = bench.run("benchmarks/gpu/save.py", "--gib", str(gib), "--device", device, "--folder", folder)
    if done.returncode:
        yield title, "FAILED", end_of(done)
        return
    found = json.loads(done.stdout.strip().splitlines()[-1])
    judged, target = bench.judged(max(found["late_s"]), most=LIMIT_S)
    shown = ", ".join(f"{seconds:.2f}" for seconds in found["late_s"])
    yield f"{title}: the next update is late", judged, f"{shown} s ({target} s)"
    yield f"{title}: holds the numbers from before it", verdict(found["is_whole"]), "two saves, each read"


def measured(gib: float, device: torch.device, folder: Path) -> dict[str, Any]:
    """Save twice; return how late the updates were, and whether each checkpoint is of one moment."""
    size = int(gib * 2**30) // 4 // _TENSORS
    state = {f"param/{place}": torch.zeros(size, device=device) for place in range(_TENSORS)}
    saver = BackgroundSaver(folder, policy=SavePolicy(retention=Retention(keep_last=1, keep_best=0)))
    saver.prepare(state)
    update(state, device)
    plain = min(timed_update(state, device) for _ in range(3))
    late, is_whole = [], True
    for step in range(2):
        before = float(state["param/0"][0])
        begun = time.perf_counter()
        saver.save(step=step, tensors=state, meta={})
        update(state, device)
        late.append(time.perf_counter() - begun - plain)
        saver.wait()
        tensors = load(saver.finished()[-1].folder).tensors
        is_whole &= all(bool((tensors[name] == before).all()) for name in (*list(state)[:2], *list(state)[-2:]))
    saver.close()
    return {"late_s": late, "is_whole": is_whole}


def timed_update(state: dict[str, torch.Tensor], device: torch.device) -> float:
    """Return the seconds of an update."""
    begun = time.perf_counter()
    update(state, device)
    return time.perf_counter() - begun


def update(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Change every tensor, and wait for the device."""
    torch._foreach_add_(list(state.values()), 1.0)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Measure, and print the result as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=18.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    print(json.dumps(measured(options.gib, torch.device(options.device), options.folder)))


if __name__ == "__main__":
    main()
