"""The parts of a first contact that hold what trainkit says of a run against the device, the driver and torch."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.bench import ALONE, Bench, Row, failed, rows_of, verdict
from benchmarks.gpu.turns import HAND
from benchmarks.gpu.workloads import WORKLOADS

PLANNED: Final = 2.0
"""Per cent by which the peak of the allocator may differ from the plan."""
ENERGY: Final = 5.0
"""Per cent by which energy may differ from the driver's power times the seconds."""
IMAGES: Final = 0.97
"""Of the images a second of torch's DataLoader, at least."""
MEMORY_CHOICES: Final = (
    ("one device", ("strategy=one_device",)),
    ("fsdp alone", ("strategy=fsdp", *ALONE)),
    ("recomputed", ("strategy=one_device", "activation_checkpointing=full")),
    ("mirrored alone", ("strategy=mirrored", *ALONE)),
)
AT_END: Final = ("checkpoint.every_epochs=null", "checkpoint.every_s=null", "checkpoint.keep_best=0")
"""A single checkpoint, at the end."""

_LIMITED: Final = (
    "import resource, runpy, sys; limit, sys.argv = int(sys.argv[1]), ['trainkit', *sys.argv[2:]]; "
    "resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)); runpy.run_module('trainkit', run_name='__main__')"
)
"""Python that trains within a limit of the private memory of its process."""
_TOO_BIG: Final = (
    "recipe=null", "model=mlp", "model.in_features=64", "model.hidden=[2048,2048,2048]", "model.out_features=10",
    "data=synthetic", "data.num_samples=32768", "data.val_samples=1", "objective=classification",
    "batch.global_size=32768", "steps=5",
)  # fmt: skip
"""A training with 1.3 GiB of activations."""
_OF_TORCH: Final = """
import sys, time, torch
from pathlib import Path
from torch.utils.data import DataLoader
from trainkit.data import ImageFolder
if __name__ == "__main__":
    path, (size, batch, workers, epochs) = Path(sys.argv[1]), map(int, sys.argv[2:])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(
        ImageFolder(split="train", path=path, image_size=size), batch_size=batch, shuffle=True, drop_last=True,
        num_workers=workers, persistent_workers=True, prefetch_factor=2, pin_memory=device.type == "cuda",
    )
    for _ in range(epochs):
        begun = time.perf_counter()
        for batch_of in loader:
            moved = [tensor.to(device, non_blocking=True) for tensor in batch_of]
        moved[1].sum().item()
        took = time.perf_counter() - begun
    print(len(loader) * batch / took)
"""
"""Python that reads epochs of a folder of images by torch's DataLoader, and prints images a second of the last one."""


def oom(bench: Bench) -> Iterator[Row]:
    """Train what does not fit: a run must end in its first step, with remedies."""
    gpt = WORKLOADS["gpt"](bench.small)
    of_gpt = (*gpt.overrides, *gpt.sizes, "recipe=null", "steps=5")
    on_gpu: Sequence[tuple[str, tuple[str, ...], tuple[str, ...], dict[str, str]]] = (
        ("activations in 4 % of the memory", ("-m", "trainkit"), of_gpt, {"TRAINKIT_MEMORY_SHARE": "0.04"}),
        ("parameters in 0.5 % of it", ("-m", "trainkit"), of_gpt, {"TRAINKIT_MEMORY_SHARE": "0.005"}),
    )
    within = ("-c", _LIMITED, str(2**30))
    for title, command, arguments, environ in (
        [("activations in 1 GiB", within, _TOO_BIG, {})] if bench.small else on_gpu
    ):
        with tempfile.TemporaryDirectory() as folder:
            start, run = time.monotonic(), Path(folder) / "run"
            fixed = ("quiet=true", "logger=[]", "callbacks=[]", f"hydra.run.dir={run}")
            done = bench.run(*command, *fixed, *arguments, environ=environ)
            took, path = time.monotonic() - start, run / "result.json"
            lines = str(json.loads(path.read_text()).get("reason", "")).splitlines() if path.is_file() else []
        remedies = [line.split("  ")[1] for line in lines[1:] if " less: " in line]
        if done.returncode != 1 or not lines:
            yield failed(title, done)
            continue
        holds = "is out of memory" in lines[0] and bool(remedies)
        yield title, verdict(holds), f"{lines[0]} {', '.join(remedies)}; {took:.0f} s after the launch"


def memory(bench: Bench) -> Iterator[Row]:
    """Hold the peak of a run's allocator against its plan, beside the peak of a loop by hand."""
    workload = WORKLOADS["gpt"](bench.small)
    hardware = ("hardware=laptop",) if bench.small else ()
    base = (*workload.overrides, *workload.sizes, "recipe=null", "steps=24", *hardware, *AT_END)
    for name, more in bench.selected(MEMORY_CHOICES):
        title = f"{workload.title}, {name}: memory"
        with tempfile.TemporaryDirectory() as folder:
            done, result = bench.train(Path(folder) / "run", *base, *more)
        yield failed(title, done) if result is None else memory_row(bench, title, result, most=PLANNED)
    title = f"{workload.title}: hand-written loop: memory"
    if bench.small:
        yield title, "-", "a CPU counts none"
        return
    done = bench.run("-m", "benchmarks.gpu.turns", "gpt", HAND, "--rounds", "1")
    peaks = [json.loads(line)["peak"] for line in done.stdout.splitlines() if line.startswith('{"kind"')]
    yield (title, "-", f"{peaks[0] / 2**30:.2f} GiB") if peaks else failed(title, done)


def memory_row(bench: Bench, title: str, result: Mapping[str, Any], *, most: float) -> Row:
    """Return the row of the peak of memory beside the plan, from which it may differ by `most` per cent."""
    at_end = (result.get("measured") or {}).get("at_end", {})
    differs = at_end.get("per_cent", {}).get("memory")
    if differs is None:
        return title, "-", "the plan of so small a run has no figure to compare"
    judged, target = bench.judged(abs(differs), most=most)
    return title, judged, f"{at_end['memory'] / 2**30:.2f} GiB, {differs:+.1f} % of the plan ({target} %)"


def images(bench: Bench) -> Iterator[Row]:
    """Read images of a folder by worker processes, beside torch's DataLoader with the same dataset and workers."""
    size, batch, workers, count = (32, 16, 1, 64) if bench.small else (224, 256, os.cpu_count() or 8, 8192)
    title = f"{count} pictures of 500 x 375, crops of {size}, {workers} workers"
    with tempfile.TemporaryDirectory() as folder:
        pictures, run, script = Path(folder) / "pictures", Path(folder) / "run", Path(folder) / "of_torch.py"
        _draw_pictures(pictures, count)
        script.write_text(_OF_TORCH)
        loader = bench.run(str(script), str(pictures), str(size), str(batch), str(workers), "3")
        per_epoch = count // batch
        done, result = bench.train(
            run, "recipe=null", "data=image_folder", f"data.path={pictures}", f"data.image_size={size}", "model=mlp",
            f"model.in_features={3 * size * size}", "model.hidden=[]", "model.out_features=2", "epochs=4",
            "objective=classification", f"batch.global_size={batch}", f"loader.num_workers={workers}", *AT_END,
            "batch.drop_last=true", f"log_every_steps={per_epoch}",
        )  # fmt: skip
        rows = rows_of(run)
    if loader.returncode or result is None:
        yield failed(title, loader if loader.returncode else done)
        return
    rate, ours = float(loader.stdout), batch / min(_step_seconds(rows))
    judged, target = bench.judged(ours / rate, least=IMAGES)
    yield f"{title}: torch's DataLoader", "-", f"{rate:,.0f} images/s"
    yield f"{title}: trainkit", judged, f"{ours:,.0f} images/s, {ours / rate:.2f} of torch's DataLoader ({target})"


def _step_seconds(rows: list[dict[str, Any]]) -> list[float]:
    return [(later["seconds"] - row["seconds"]) / (later["step"] - row["step"]) for row, later in pairwise(rows)]


def _draw_pictures(folder: Path, count: int) -> None:
    """Write pictures of two classes; 32 are drawn, the others are the same files under other names."""
    from PIL import Image

    draw = random.Random(0)
    for split in ("train", "val"):
        for number in range(count if split == "train" else 2):
            path = folder / split / f"class_{number % 2}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            if number >= 32:
                path.hardlink_to(folder / split / f"class_{number % 2}" / f"{number % 32}.jpg")
                continue
            coarse = Image.frombytes("RGB", (50, 38), draw.randbytes(50 * 38 * 3))
            coarse.resize((500, 375), Image.Resampling.BICUBIC).save(path, quality=90)


def energy(bench: Bench) -> Iterator[Row]:
    """Hold the energy that `bench` reports against the power that the driver reports meanwhile."""
    workload = WORKLOADS["gpt"](bench.small)
    title, steps = f"{workload.title}: energy", "4" if bench.small else "60"
    with tempfile.TemporaryDirectory() as folder, _power() as samples:
        out = Path(folder) / "bench"
        choices = "seed=0,1" if bench.small else "compile.mode=off,default"
        arguments = (choices, "strategy=one_device", "--rounds", "1", "--steps", steps, "--json", "--out", str(out))
        done = bench.run("-m", "trainkit", "bench", *arguments, "recipe=null", *workload.overrides, *workload.sizes)
    if done.returncode:
        yield failed(title, done)
        return
    for choice in json.loads(done.stdout)["choices"]:
        turn, name = choice["turns"][0], f"{title}, {choice['label']}"
        joules, seconds, end = turn["joules"], turn["seconds"], turn["began_at"] + turn["trained_s"]
        drawn = [watts for when, watts in samples if end - seconds <= when <= end]
        if joules is None or not drawn:
            yield name, "-" if bench.small else "not tried", "no energy is reported: a CPU, or no nvidia-ml-py"
            continue
        by_power = statistics.fmean(drawn) * seconds
        judged, target = bench.judged(abs(100 * (joules / by_power - 1)), most=ENERGY)
        text = f"{joules / turn['samples']:.2f} J a sample, by nvidia-smi's power {by_power / turn['samples']:.2f}"
        yield name, judged, f"{text} ({target} %)"


@contextmanager
def _power() -> Iterator[list[tuple[float, float]]]:
    """Ask nvidia-smi for the power of the first GPU inside of the block; yields a list of (time, watts)."""
    samples, over = list[tuple[float, float]](), threading.Event()

    def ask() -> None:
        command = ["nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits", "--id=0"]
        while not over.wait(0.2):
            try:
                answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
                samples.append((time.time(), float(answer.stdout)))
            except (OSError, subprocess.SubprocessError, ValueError):
                return

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


def hardware(bench: Bench) -> Iterator[Row]:
    """Measure this machine by `hardware=this`, and hold the planned step against an eager one, and against the plan of
    the GPU's own file.
    """
    workload = WORKLOADS["gpt"](bench.small)
    base = ("recipe=null", *workload.overrides, *workload.sizes)
    with tempfile.TemporaryDirectory() as folder:
        environ = {"XDG_CACHE_HOME": folder}
        if not bench.small:  # a CPU is rated without measuring
            done = bench.run("-m", "trainkit", "plan", "hardware=this", *base, "steps=24", environ=environ)
            if done.returncode:
                yield failed("hardware=this", done)
                return
        done, result = bench.train(Path(folder) / "run", *base, "steps=24", "hardware=this", *AT_END, environ=environ)
        plan = bench.run("-m", "trainkit", "plan", "--json", *base, "steps=24",
                        f"hardware={'laptop' if bench.small else 'h200'}")  # fmt: skip
    title = f"{workload.title}: planned step"
    if result is None or plan.returncode:
        yield failed(title, done if result is None else plan)
        return
    planned, measured = result["plan"], result["measured"]["step_s"]
    if planned["step_s"] is None:
        yield title, "FAILED", "the plan has no time"
        return
    low, high = planned["low_s"], planned["high_s"]
    judged = "-" if bench.small else "ok" if low <= measured <= high else "missed"
    by_file = json.loads(plan.stdout)["time"]
    yield (
        title,
        judged,
        (
            f"{measured * 1e3:.1f} ms; hardware=this {low * 1e3:.1f} to {high * 1e3:.1f} (target: between), "
            f"the file of the device {by_file['low_s'] * 1e3:.1f} to {by_file['high_s'] * 1e3:.1f}"
        ),
    )
