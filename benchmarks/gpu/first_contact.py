"""Try trainkit on a GPU for the first time: tests, numbers, exchanges, failures, then speed beside hand-written loops.

    python benchmarks/gpu/first_contact.py [PART ...] [--out FOLDER] [--small]

Each part takes at most 9 minutes on one device, and all of them at most 45; without PART all run, one after the other.
A part writes OUT/PART.json, and OUT/first_contact.md shows all parts that OUT holds. A part that fails says so there,
and the others run. `--small` tries this script: it runs all parts on the CPU with tiny trainings,
and of the precisions, strategies and failures of a part the first alone.

tests       the tests that need a GPU
prove       the numbers of mirrored and fsdp, each alone in a process group, against those of one device
alone       weights after a training in a process group of one rank (NCCL on a GPU) against those of one_device
pair        the same of two ranks on one device, over gloo
failures    a rank that raises and a rank that is killed are named
mlp, resnet, gpt    steps a second in turns with a hand-written loop
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
import yaml

from benchmarks import report
from benchmarks.gpu.workloads import WORKLOADS

LIMIT_S: Final = 540
"""Seconds of a part, at most."""
ALONE: Final = ("strategy.replicas=1", "strategy.process_group=always")
TOLERANCES: Final = {"fp64": 1e-10, "fp32": 1e-4, "bf16_mixed": 3e-2}
"""The largest relative difference of weights after 20 steps, by precision: many times its rounding."""
COMMON: Final = (
    "quiet=true", "callbacks=[]", "logger=[]", "eval.every_epochs=null", "eval.every_steps=null",
    "checkpoint.export=false",
)  # fmt: skip

Row = Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """How the parts run."""

    small: bool
    deadline: float
    """On the clock of `time.monotonic`: a part ends its processes then."""

    @property
    def environ(self) -> dict[str, str]:
        """The environment of the processes: `--small` hides the GPUs."""
        own = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if self.small else {}
        return {**os.environ, "PYTHONPATH": str(ROOT), **own}

    def tried(self, choices: Sequence[str]) -> Sequence[str]:
        """Return the choices of a part that run: with `--small` the first."""
        return choices[:1] if self.small else choices

    def run(self, *command: str, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run Python in the root of the project until the deadline."""
        return subprocess.run(
            [sys.executable, *command], cwd=ROOT, env={**self.environ, **(environ or {})}, capture_output=True,
            text=True, check=False, timeout=max(self.deadline - time.monotonic(), 1.0),
        )  # fmt: skip

    def train(self, folder: Path, *overrides: str, fail: str = "") -> tuple[subprocess.CompletedProcess[str], Any]:
        """Train by the command; return the process, and what result.json holds, None if there is none."""
        own = ("--config-dir", "benchmarks/conf", "--allow-package=benchmarks")
        done = self.run(
            "-m", "trainkit", *own, *COMMON, *overrides, f"hydra.run.dir={folder}",
            environ={"TRAINKIT_FAIL": fail} if fail else {},
        )  # fmt: skip
        path = folder / "result.json"
        return done, json.loads(path.read_text()) if path.is_file() else None


def tests(bench: Bench) -> Iterator[Row]:
    """Run the tests that need a GPU."""
    chosen = ["tests/contract/test_device_map.py"] if bench.small else []
    done = bench.run("-m", "pytest", "-q", "-m", "gpu", "--numprocesses", "0", *chosen)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["no output"]
    yield "pytest -m gpu", _verdict(done.returncode == 0), lines[-1].strip("= ")
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            yield line.split(" - ")[0], "FAILED", line.partition(" - ")[2]


def prove(bench: Bench) -> Iterator[Row]:
    """Prove strategies alone in a process group against one device."""
    strategies = f"strategy={','.join(bench.tried(('mirrored', 'fsdp')))}"
    for precision in bench.tried(("fp64", "fp32", "bf16_mixed")):
        done = bench.run("-m", "trainkit", "prove", "recipe=digits", strategies, *ALONE, f"precision={precision}")
        said = [line.strip() for line in done.stdout.splitlines() if "the same numbers" in line]
        yield f"prove, {precision}", _verdict(done.returncode == 0), "; ".join(said) or _end(done)


def alone(bench: Bench) -> Iterator[Row]:
    """Compare trainings in a process group of one rank with one device."""
    strategies = bench.tried(("strategy=mirrored", "strategy=fsdp"))
    yield from _compared(bench, [[strategy, *ALONE] for strategy in strategies])


def pair(bench: Bench) -> Iterator[Row]:
    """Compare two ranks on one device with one device."""
    reducers = bench.tried(("backend", "ring"))
    yield from _compared(bench, [["strategy=pair_on_one_device", f"strategy.reduce={one}"] for one in reducers])


def _compared(bench: Bench, choices: Sequence[Sequence[str]]) -> Iterator[Row]:
    steps = ("recipe=digits", "steps=20", "batch.micro_size=16", "model.dropout=0.1", "clip.max_norm=1.0")
    for precision in bench.tried(tuple(TOLERANCES)):
        with tempfile.TemporaryDirectory() as folder:
            base = Path(folder) / "base"
            done, result = bench.train(base, *steps, f"precision={precision}", "strategy=one_device")
            if result is None or done.returncode:
                yield f"one_device, {precision}", "FAILED", _end(done)
                continue
            expected = _weights(result)
            for place, choice in enumerate(choices):
                name = f"{' '.join(choice)}, {precision}".replace("strategy=", "", 1)
                done, result = bench.train(Path(folder) / str(place), *steps, f"precision={precision}", *choice)
                if result is None or done.returncode:
                    yield name, "FAILED", _end(done)
                    continue
                furthest = _distance(expected, _weights(result))
                text = "the same bits" if furthest == 0 else f"largest relative difference {furthest:.1e}"
                yield name, _verdict(furthest <= TOLERANCES[precision]), text


def _weights(result: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    from trainkit.trainer.checkpoint import load

    tensors = load(Path(result["last"])).tensors
    return {key: tensor for key, tensor in tensors.items() if key.startswith("param/")}


def _distance(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference, relative to the largest number of its tensor."""
    pairs = ((one[name].double(), other[name].double()) for name in one)
    return max(float((a - b).abs().max() / a.abs().max().clamp_min(1e-30)) for a, b in pairs)


def failures(bench: Bench) -> Iterator[Row]:
    """Let rank 1 of two raise, and be killed; both must be named."""
    for action in bench.tried(("raise", "kill")):
        with tempfile.TemporaryDirectory() as folder:
            done, result = bench.train(
                Path(folder) / "run", "recipe=digits", "steps=20", "strategy=pair_on_one_device",
                "supervisor.max_restarts=0", fail=f"rank=1,step=3,phase=forward,action={action}",
            )  # fmt: skip
        reason = str((result or {}).get("reason", "")).partition("\n")[0]
        yield f"rank 1: {action}", _verdict(reason.startswith("rank 1 ") and done.returncode == 1), reason or _end(done)


def speed(bench: Bench, *, name: str) -> Iterator[Row]:
    """Measure steps in turns with a hand-written loop; the ratio is that of samples a second."""
    workload = WORKLOADS[name](bench.small)
    rounds, steps = (1, 15) if bench.small else (3, 60)
    modes = bench.tried(("off", "default", *(("step",) if name == "mlp" else ())))
    device = "cpu" if bench.small else "cuda"
    hand: list[float] = []
    ours: dict[str, list[float]] = {mode: [] for mode in modes}
    flops, failed = 0, {}
    for _ in range(rounds):
        small = ["--small"] if bench.small else []
        done = bench.run("benchmarks/gpu/by_hand.py", name, "--device", device, "--steps", str(steps), *small)
        if done.returncode:
            yield "hand-written loop", "FAILED", _end(done)
            return
        found = json.loads(done.stdout.strip().splitlines()[-1])
        hand.append(statistics.median(found["step_s"]))
        flops = found["flops"]
        for mode in modes:
            seconds = _seconds_a_step(bench, [*workload.overrides, *workload.sizes, f"compile.mode={mode}"], steps)
            if isinstance(seconds, str):
                failed[mode] = seconds
            else:
                ours[mode].append(seconds)
    yield f"{workload.title}: hand-written loop", "-", _pace(statistics.median(hand), workload.batch, workload, flops)
    for mode, times in ours.items():
        title = f"{workload.title}: trainkit, compile.mode={mode}"
        if mode in failed:
            yield title, "FAILED", failed[mode]
            continue
        ratio = report.ratio(hand, times)
        yield title, ratio, _pace(statistics.median(times), workload.batch, workload, flops)


def _seconds_a_step(bench: Bench, overrides: Sequence[str], steps: int) -> float | str:
    """Return the median seconds a step of windows of five after the first third of the steps; or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        done, result = bench.train(
            Path(folder) / "run", "recipe=null", "strategy=one_device", f"steps={steps}", "log_every_steps=5",
            "checkpoint.every_epochs=null", *overrides,
        )  # fmt: skip
        if result is None or done.returncode:
            return _end(done)
        rows = [json.loads(line) for line in (Path(folder) / "run/metrics.jsonl").read_text().splitlines()]
    stamps = [(row["step"], row["seconds"]) for row in rows if "train/loss" in row and row["step"] >= steps // 3]
    steps_s = ((later[1] - one[1]) / (later[0] - one[0]) for one, later in itertools.pairwise(stamps))
    found: float = statistics.median(steps_s)
    return found


def _pace(step_s: float, batch: int, workload: Any, flops: int) -> str:
    unit = "tokens" if workload.units > 1 else "samples"
    text = f"{step_s * 1e3:.2f} ms a step, {batch * workload.units / step_s:,.0f} {unit}/s"
    peak = _peak("bf16" if workload.mixed else "tf32")
    return text if peak is None else f"{text}, MFU {flops / step_s / peak:.1%}"


def _peak(form: str) -> float | None:
    """Return the operations a second of the GPU in a number format, where conf/hardware has the GPU."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(0).lower()
    for path in sorted((ROOT / "conf/hardware").glob("*.yaml")):
        if set(path.stem.split("_")) <= set(re.split(r"[\s-]+", name)) | {"sxm"}:
            rate = (yaml.safe_load(path.read_text()).get("tflops") or {}).get(form)
            return None if rate is None else rate * 1e12
    return None


def _verdict(holds: bool) -> str:
    return "ok" if holds else "FAILED"


def _end(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last lines of a process that failed, in one line."""
    lines = [line.strip() for line in (done.stderr.strip() or done.stdout.strip()).splitlines()]
    return f"exit code {done.returncode}: {' / '.join(lines[-3:])}"[:600].replace("|", "\\|")


PARTS: Final[Mapping[str, Callable[[Bench], Iterator[Row]]]] = {
    "tests": tests,
    "prove": prove,
    "alone": alone,
    "pair": pair,
    "failures": failures,
    **{name: partial(speed, name=name) for name in ("mlp", "resnet", "gpt")},
}


def run_part(name: str, out: Path, *, small: bool) -> bool:
    """Run a part, and write its rows; return whether none failed."""
    begun, rows = time.monotonic(), []
    bench = Bench(small=small, deadline=begun + LIMIT_S)
    print(f"{name} ...", flush=True)
    try:
        for row in PARTS[name](bench):
            rows.append(list(row))
            print(f"  {row[0]}: {row[1]}  {row[2]}", flush=True)
    except subprocess.TimeoutExpired:
        rows.append([name, "FAILED", f"did not end within {LIMIT_S} s"])
    device = "CPU" if small or not torch.cuda.is_available() else torch.cuda.get_device_name(0)
    content = {"part": name, "device": device, "machine": report.machine(), "seconds": time.monotonic() - begun}
    (out / f"{name}.json").write_text(
        json.dumps({**content, "date": time.strftime("%Y-%m-%d"), "rows": rows}, indent=1)
    )
    return bool(rows) and all(row[1] != "FAILED" for row in rows)


def write_page(out: Path) -> Path:
    """Write the page of all parts that the folder holds."""
    found = [json.loads((out / f"{name}.json").read_text()) for name in PARTS if (out / f"{name}.json").is_file()]
    lines = ["# First contact with a device", ""]
    for one in found:
        lines += [
            f"## {one['part']}",
            "",
            f"{one['date']}, {one['device']}, {one['seconds']:.0f} s. {one['machine']}.",
            "",
        ]
        lines += [report.table(["what", "result", "figure"], one["rows"]), ""]
    path = out / "first_contact.md"
    path.write_text("\n".join(lines))
    return path


def main() -> int:
    """Run the parts."""
    parser = argparse.ArgumentParser(description="Try trainkit on a GPU for the first time.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}; without: all")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "gpu", help="folder of the results")
    parser.add_argument("--small", action="store_true", help="tiny trainings on the CPU")
    options = parser.parse_args()
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if not options.small and not torch.cuda.is_available():
        parser.error("torch sees no GPU here. --small tries the script on the CPU.")
    options.out.mkdir(parents=True, exist_ok=True)
    ended_well = [run_part(name, options.out, small=options.small) for name in options.parts or PARTS]
    print(f"written to {write_page(options.out)}")
    return int(not all(ended_well))


if __name__ == "__main__":
    sys.exit(main())
