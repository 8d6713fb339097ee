"""The parts of a first contact that compare numbers, and the parts that plant failures."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.gpu.bench import ALONE, OVER, OWN, ROOT, TIME_OVER, Bench, Row, end_of, failed, verdict

TOLERANCES: Final = {"fp64": 1e-10, "fp32": 1e-4, "bf16_mixed": 3e-2}
"""The largest relative difference of weights after 20 steps, by precision: many times its rounding."""
COMPILED: Final = {"fp32": 1e-4, "bf16_mixed": 3e-2, "fp16_mixed": 1e-2}
"""The same of compiled steps, whose fused kernels round otherwise."""
DIGITS: Final = ("recipe=digits", "steps=20", "clip.max_norm=1.0")
DRAWING: Final = ("batch.micro_size=16", "model.dropout=0.1")
ALONE_CHOICES: Final = (("strategy=mirrored", *ALONE), ("strategy=fsdp", *ALONE))
PAIRS: Final = tuple(("strategy=pair_on_one_device", f"strategy.reduce={reducer}") for reducer in ("backend", "ring"))
AXES: Final = (
    "context=2", "pipe=2", "tensor=2", "shard=2", "replicate=2", "replicate=2 strategy.shard=2",
)  # fmt: skip
"""Meshes of two ranks on one device, one axis each; in the last, the copies exchange parts while backward computes."""
TEXT: Final = (
    "recipe=null", "model=gpt", "model.num_layers=2", "model.num_heads=2", "model.width=64", "model.context=64",
    "model.vocab_size=256", "data=synthetic_tokens", "data.vocab_size=256", "data.context=64", "data.num_samples=192",
    "data.val_samples=1", "objective=language_modelling", "objective.padding=false", "steps=24", "clip.max_norm=1.0",
    "batch.global_size=8", "batch.micro_size=2", "precision=fp64", "optimizer=sgd", "optimizer.lr=0.1",
)  # fmt: skip
"""A training of full, equal steps, whose bytes the plan counts."""
SENT: Final = 3.0
"""Per cent by which the bytes of a step may differ from the plan: packets have headers."""
MODES: Final = ("captured", "step", "default")
SHARDS: Final = (4, 1)
FAILURES: Final = ("raise", "kill")
_LAST_TESTS_S: Final = 60.0
"""Seconds in which tests that have begun end, and pytest shows the errors of failed tests."""


def maps(*, small: bool) -> tuple[tuple[str, ...], ...]:
    """Return the choices of a model over the GPU and the CPU; with `small` both places are the CPU."""
    device_name, device = ("/cpu:0", "cpu") if small else ("0", "0")
    return (
        ("strategy=device_map", f"strategy.map={{layers.0:cpu,rest:{device_name}}}"),
        ("strategy=mirrored", f"strategy.devices=[[{device},cpu]]", "strategy.map={layers.0:1,rest:0}"),
    )


def tests(bench: Bench) -> Iterator[Row]:
    """Run the tests that need a GPU; no test begins in the last minute of the part."""
    chosen = ["tests/contract/test_device_map.py"] if bench.small else _files_of_tests()
    at_once = ("--numprocesses", str(bench.at_once if bench.at_once > 1 else 0), "--maxprocesses", str(bench.at_once))
    until = ("--session-timeout", f"{max(bench.left_s - _LAST_TESTS_S, 1.0):.0f}")
    done = bench.run("-m", "pytest", "-v", "-m", "gpu", *at_once, *until, *chosen)
    yield from rows_of_tests(done)


def rows_of_tests(done: subprocess.CompletedProcess[str]) -> Iterator[Row]:
    """Yield the row of all tests, and one for each that failed, also of tests that were not done in time."""
    ended = [row for line in done.stdout.splitlines() if (row := _ended_test(line)) is not None]
    counts = Counter(result for result, _ in ended)
    text = ", ".join(f"{count} {result.lower()}" for result, count in sorted(counts.items())) or end_of(done)
    is_over = done.returncode == OVER or "session-timeout: " in done.stdout
    left_out = is_over and not counts["FAILED"] + counts["ERROR"]
    result = "ok" if done.returncode == 0 else "not tried" if left_out else "FAILED"
    yield "pytest -m gpu", result, f"{text}; {TIME_OVER}" if is_over else text
    reasons = dict(
        line.partition(" - ")[::2] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))
    )
    for result, name in ended:
        if result in ("FAILED", "ERROR"):
            yield f"{result} {name}", "FAILED", reasons.get(f"{result} {name}", "").replace("|", "\\|")


def _ended_test(line: str) -> tuple[str, str] | None:
    """Return result and name of a test from a line of `pytest -v`; with several processes the result comes first."""
    match = re.match(r"\[gw\d+\] \[ *\d+%\] ([A-Z]+) (\S+::.*?)\s*$", line)
    if match is not None:
        return match[1], match[2]
    match = re.match(r"(\S+::.*) ([A-Z]+)(?: \(.*\))? +\[ *\d+%\]$", line)
    return None if match is None else (match[2], match[1])


def _files_of_tests() -> list[str]:
    """Return the files with tests that need a GPU: to collect all tests takes longer than to run these."""
    tests = (path for path in (ROOT / "tests").rglob("test_*.py") if "@pytest.mark.gpu" in path.read_text())
    return [str(path.relative_to(ROOT)) for path in sorted(tests)]


def prove(bench: Bench) -> Iterator[Row]:
    """Prove strategies alone in a process group, and two ranks on one device; the numbers are compared in fp64."""
    strategies = (("strategy=mirrored,fsdp", *ALONE), PAIRS[0])
    for chosen in bench.selected(strategies):
        title = f"prove {' '.join(chosen)}"
        done = bench.run("-m", "trainkit", "prove", *OWN, "recipe=digits", *chosen)
        lines = [line.strip() for line in done.stdout.splitlines() if "the same numbers" in line]
        yield (title, "ok", "; ".join(lines)) if done.returncode == 0 else failed(title, done)


def alone(bench: Bench) -> Iterator[Row]:
    """Compare trainings in a process group of one rank with one device."""
    yield from _compared(bench, bench.selected(ALONE_CHOICES))


def pair(bench: Bench) -> Iterator[Row]:
    """Compare two ranks on one device with one device."""
    yield from _compared(bench, bench.selected(PAIRS))


def mesh(bench: Bench) -> Iterator[Row]:
    """Compare each axis of the mesh, its ranks on one device, with one device, and its bytes with the plan."""
    bench = replace(bench, at_once=1)  # all that runs sends over the same loopback device
    for axis in bench.selected(AXES):
        arguments = (*TEXT, *of_mesh(axis), "callbacks=[loopback]")
        yield from _all_against(bench, [((*TEXT, "strategy=one_device"), [arguments], "fp64")])
        if (exchanged := bench.cache.get(("bytes", *arguments))) is None:
            continue  # it failed, and has a row
        sent, planned = exchanged
        judged, target = bench.judged(abs(100 * (sent / planned - 1)), most=SENT)
        text = f"{sent / 1e6:.2f} MB a step over the loopback device, planned {planned / 1e6:.2f} ({target} %)"
        yield f"strategy.{axis}: bytes", judged, text


def of_mesh(axis: str) -> tuple[str, ...]:
    """Return the arguments of a mesh on one device."""
    return "strategy=mesh_on_one_device", *f"strategy.{axis}".split()


def _sent_and_planned(run: Path) -> tuple[float, float] | None:
    """Return bytes of a step over the loopback device and in the plan of a run; None if it has not counted them."""
    counts, plan = run / "loopback", run / "plan.json"
    if not (counts.is_file() and plan.is_file()):
        return None
    totals = [int(line) for line in counts.read_text().splitlines()]
    steps = [later - total for total, later in pairwise(totals[5:20])]
    return statistics.median(steps), sum(json.loads(plan.read_text())["traffic"]["links"].values())


def mapped(bench: Bench) -> Iterator[Row]:
    """Compare a model over the GPU and the CPU with one device."""
    yield from _compared(bench, bench.selected(maps(small=bench.small)))


def _compared(bench: Bench, choices: Sequence[Sequence[str]]) -> Iterator[Row]:
    """Compare weights with those of one_device, in every precision."""
    comparisons = list[_Comparison]()
    for precision in bench.selected(tuple(TOLERANCES)):
        base = (*DIGITS, *DRAWING, f"precision={precision}")
        comparisons.append(((*base, "strategy=one_device"), [(*base, *choice) for choice in choices], precision))
    yield from _all_against(bench, comparisons)


def modes(bench: Bench) -> Iterator[Row]:
    """Compare compiled steps with eager ones: accumulation x precision x mode."""
    comparisons = list[_Comparison]()
    for precision in bench.selected(tuple(COMPILED)):
        for shards in bench.selected(SHARDS):
            sizes = ("batch.global_size=64", f"batch.micro_size={64 // shards}")
            base = (*DIGITS, *sizes, f"precision={precision}")
            compiled = [(*base, *bench.compiled(mode)) for mode in bench.selected(MODES)]
            comparisons.append((base, compiled, precision))
    yield from _all_against(bench, comparisons)


_Comparison = tuple[Sequence[str], Sequence[Sequence[str]], str]
"""The arguments of a training, those of trainings that must end with the same weights, and the precision."""


def _all_against(bench: Bench, comparisons: Sequence[_Comparison]) -> Iterator[Row]:
    """Run all trainings, some at the same time, and compare their weights."""
    trainings = dict.fromkeys(overrides for base, candidates, _ in comparisons for overrides in (base, *candidates))
    with ThreadPoolExecutor(bench.at_once) as threads:
        running = {overrides: threads.submit(_weights, bench, overrides) for overrides in trainings}
        try:
            for base, candidates, precision in comparisons:
                for overrides in (base, *candidates):
                    running[overrides].result()
                yield from _against(bench, base, candidates, precision)
        except BaseException:  # Ctrl-C: do not wait for the rest
            threads.shutdown(wait=False, cancel_futures=True)
            bench.end()
            raise


def _against(bench: Bench, base: Sequence[str], candidates: Sequence[Sequence[str]], precision: str) -> Iterator[Row]:
    expected = _weights(bench, base)
    if isinstance(expected, subprocess.CompletedProcess):
        yield failed(" ".join(base), expected)
        return
    tolerance = {**COMPILED, **TOLERANCES}[precision]
    for other in candidates:
        name = " ".join(override for override in other if override not in (*DIGITS, *TEXT))
        weights = _weights(bench, other)
        if isinstance(weights, subprocess.CompletedProcess):
            yield failed(name, weights)
            continue
        furthest = _distance(expected, weights)
        text = "the same bits" if furthest == 0 else f"largest relative difference {furthest:.1e}"
        yield name, verdict(furthest <= tolerance), text


def _weights(bench: Bench, overrides: Sequence[str]) -> dict[str, torch.Tensor] | subprocess.CompletedProcess[str]:
    """Return the weights that a training ends with, or its process if it did not end well; a training runs once."""
    from trainkit.trainer.checkpoint.tensors import load

    key = ("weights", *overrides)
    if key in bench.cache:
        outcome: dict[str, torch.Tensor] | subprocess.CompletedProcess[str] = bench.cache[key]
        return outcome
    with tempfile.TemporaryDirectory() as folder:
        done, result = bench.train(Path(folder) / "run", *overrides)
        if result is not None:
            tensors = load(Path(result["last"])).tensors
            bench.cache["bytes", *overrides] = _sent_and_planned(Path(folder) / "run")
            bench.cache[key] = weights = {name: tensors[name].clone() for name in tensors if name.startswith("param/")}
            return weights
    if done.returncode != OVER:  # another part may have the time for it
        bench.cache[key] = done
    return done


def _distance(expected: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference, relative to the largest number of its tensor."""
    pairs = ((expected[name].double(), other[name].double()) for name in expected)
    return max(float((a - b).abs().max() / a.abs().max().clamp_min(1e-30)) for a, b in pairs)


def failpoint(action: str) -> str:
    """Return the failure that is planted in rank 1."""
    return f"rank=1,step=3,phase=forward,action={action}"


def failures(bench: Bench) -> Iterator[Row]:
    """Let rank 1 of two raise, and be killed; both must be named."""
    for action in bench.selected(FAILURES):
        with tempfile.TemporaryDirectory() as folder:
            pair_of_ranks: Any = ("recipe=digits", "steps=20", *PAIRS[0], "supervisor.max_restarts=0")
            done, result = bench.train(Path(folder) / "run", *pair_of_ranks, fail=failpoint(action))
        reason = str((result or {}).get("reason", "")).partition("\n")[0]
        holds = reason.startswith("rank 1 ") and done.returncode == 1
        title = f"rank 1: {action}"
        yield (title, verdict(holds), reason) if reason and done.returncode != OVER else failed(title, done)
