"""Try trainkit on a GPU for the first time: numbers, failures, tests, exchanges, speed beside hand-written loops.

    python benchmarks/gpu/first_contact.py [PART ...] [--out FOLDER] [--part-s 150] [--rounds 3] [--at-once N] [--small]

Each part takes at most 150 s on one device, and all of them at most 55 minutes; without PART all run, one after the
other. `--part-s` and `--rounds` change the seconds of a part, and its turns with a hand-written loop at most.
Trainings whose time is not measured run at the same time: as many as a quarter of the processor cores.
A part writes OUT/PART.json, and OUT/first_contact.md shows all parts that OUT holds; each row is written as soon as it
is known. A part that fails says so there, and the others run; what did not fit into the time of a part, and a part that
has not begun after 55 minutes, are written down as not tried. A figure below its target is `missed`. `--small` tries
this script: it runs all parts on the CPU with tiny trainings, two at the same time, in at most 3 minutes of two cores,
judges no figure, and of the choices of a part runs the first alone.

tests       the tests that need a GPU
alone       weights after a training in a process group of one rank (NCCL on a GPU) against those of one_device
gpt, resnet, resnet_shards, mlp    steps a second in turns with a hand-written loop; MFU
gpt_large   MFU and memory of a GPT of 1.3 B parameters under fsdp in a world of one, beside a hand-written loop
gpt_float8  the same with products in float8
save        how long a save of 18 GiB keeps the training
overlap     exchanges that begin inside of backward, by precision, and a picture of a step
modes       weights after compiled steps against eager ones: accumulation x precision x mode
mapped      the same of a model over the GPU and the CPU, alone and as a replica of mirrored
prove       the numbers of mirrored and fsdp, each alone in a process group, and of two ranks on one device, in fp64
pair        weights of two ranks on one device, over gloo
mesh        the same of each axis of the mesh: context, pipe, tensor, shard, replicate; and the bytes of the plan
failures    a rank that raises and a rank that is killed are named
oom         a training that does not fit ends in its first step, with remedies
memory      the peak of the allocator against the plan, beside that of a hand-written loop
images      images a second of worker processes, beside torch's DataLoader
energy      joules of a sample by `bench`, beside nvidia-smi
hardware    the planned step by `hardware=this`, beside the file of the device, against a measured one

With a quarter of an hour, the order is: prove failures oom pair mlp resnet tests, then alone gpt overlap mesh memory,
with `--rounds 1` (docs/gpus.md).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from benchmarks import report
from benchmarks.gpu import comparing, holding, overlap, save, speed
from benchmarks.gpu.bench import Bench, Row

PART_S: Final = 150
"""Seconds of a part, at most."""
ALL_S: Final = 55 * 60
"""Seconds of all parts, at most; a part that has not begun by then is not tried."""
AT_ONCE: Final = "trainings that run at the same time where no time is measured"
SMALL_S: Final = 180
"""Seconds of `--small`, at most, on two cores that nothing else uses."""
SHARED: Final = 5
"""By how much longer `--small` may take where other programs use the cores."""
SMALL_AT_ONCE: Final = 2
"""Parts that run at the same time with `--small`, which measures no time."""

PARTS: Final[Mapping[str, Callable[[Bench], Iterable[Row]]]] = {
    "prove": comparing.prove,
    "failures": comparing.failures,
    "oom": holding.oom,
    "pair": comparing.pair,
    "mlp": partial(speed.speed, name="mlp"),
    "resnet": partial(speed.speed, name="resnet"),
    "tests": comparing.tests,
    "alone": comparing.alone,
    "gpt": partial(speed.speed, name="gpt"),
    "overlap": overlap.overlap,
    "mesh": comparing.mesh,
    "memory": holding.memory,
    "gpt_large": partial(speed.large, kind="bf16"),
    "gpt_float8": partial(speed.large, kind="float8"),
    "modes": comparing.modes,
    "resnet_shards": partial(speed.speed, name="resnet_shards"),
    "images": holding.images,
    "energy": holding.energy,
    "hardware": holding.hardware,
    "save": save.saves,
    "mapped": comparing.mapped,
}
"""In the order in which they run without PART: what little time is worth most for comes first."""

BAD: Final = ("FAILED", "missed", "not tried")
"""Results that a page begins with."""


def rows_of(name: str, bench: Bench) -> Iterator[Row]:
    """Yield the rows of a part; an error is a row, too."""
    try:
        yield from PARTS[name](bench)
    except Exception as error:  # noqa: BLE001 - the other parts are worth their time
        yield name, "FAILED", f"{type(error).__name__}: {error}".replace("\n", " ").replace("|", "\\|")[:600]


def run_part(
    name: str, options: argparse.Namespace, *, end: float, cache: dict[Any, Any], running: set[Any]
) -> list[Row]:
    """Run a part, unless all parts have had their time; write each row as soon as it is known, and return all."""
    start, rows, small, out = time.monotonic(), list[Row](), options.small, options.out
    device = "CPU" if small or not torch.cuda.is_available() else torch.cuda.get_device_name(0)
    bench = Bench(
        small=small, deadline=min(start + options.part_s, end), rounds=1 if small else options.rounds,
        at_once=1 if small else options.at_once, out=out, device_name=device, cache=cache, running=running,
    )  # fmt: skip
    content = {"part": name, "device": device, "machine": report.machine(), "date": time.strftime("%Y-%m-%d")}

    def write() -> None:
        shown = rows or [(name, "not tried", "the script was ended in this part")]
        text = json.dumps({**content, "seconds": time.monotonic() - start, "rows": shown}, indent=1)
        with _WRITES:
            (out / f"{name}.json").write_text(text)
            write_page(out)

    print(f"{name} ...", flush=True)
    write()
    for row in rows_of(name, bench) if start < end else [(name, "not tried", "no time was left")]:
        rows.append(row)
        print(f"  {row[0]}: {row[1]}  {row[2]}", flush=True)
        write()
    write()
    return rows


_WRITES: Final = Lock()


def processors_s() -> float:
    """Return the processor seconds of this process and of those that it has waited for."""
    usages = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def write_page(out: Path) -> Path:
    """Write the page of all parts that the folder holds; what was missed, failed or not tried comes first."""
    parts = [json.loads((out / f"{name}.json").read_text()) for name in PARTS if (out / f"{name}.json").is_file()]
    lines = ["# First contact with a device", ""]
    for result in BAD:
        named = [row[0] for part in parts for row in part["rows"] if row[1] == result]
        lines += [f"{result}: {'; '.join(named)}.", ""] if named else []
    for part in parts:
        lines += [
            f"## {part['part']}",
            "",
            f"{part['date']}, {part['device']}, {part['seconds']:.0f} s. {part['machine']}.",
            "",
        ]
        lines += [report.table(["what", "result", "figure"], part["rows"]), ""]
    if (out / "overlap.png").is_file():
        lines += ["![A step of overlap](overlap.png)", ""]
    path = out / "first_contact.md"
    path.write_text("\n".join(lines))
    return path


def main() -> int:
    """Run the parts; return 1 if a row failed, a part was not tried, or `--small` took too long."""
    parser = argparse.ArgumentParser(description="Try trainkit on a GPU for the first time.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}; without: all")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "gpu", help="folder of the results")
    parser.add_argument("--part-s", type=float, default=PART_S, help="seconds of a part, at most")
    parser.add_argument("--rounds", type=int, default=3, help="turns with a hand-written loop, at most")
    parser.add_argument("--at-once", type=int, default=max(1, (os.cpu_count() or 1) // 4), help=AT_ONCE)
    parser.add_argument("--small", action="store_true", help="tiny trainings on the CPU")
    options = parser.parse_args()
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if not options.small and not torch.cuda.is_available():
        parser.error("torch sees no GPU here. --small tries the script on the CPU.")
    options.out.mkdir(parents=True, exist_ok=True)
    start, limit, used = time.monotonic(), SMALL_S if options.small else ALL_S, processors_s()
    end, running = start + limit * (SHARED if options.small else 1), set[Any]()
    run_one = partial(run_part, options=options, end=end, cache={}, running=running)
    with ThreadPoolExecutor(SMALL_AT_ONCE if options.small else 1) as pool:
        try:
            rows = [row for part_rows in pool.map(run_one, options.parts or PARTS) for row in part_rows]
        except BaseException:  # Ctrl-C: do not wait for the rest
            pool.shutdown(wait=False, cancel_futures=True)
            Bench(small=options.small, deadline=0, running=running).end()
            raise
    took = time.monotonic() - start
    if options.small:  # other programs may use the cores
        took = min(took, (processors_s() - used) / SMALL_AT_ONCE)
    counts = ", ".join(f"{result}: {sum(row[1] == result for row in rows)}" for result in BAD)
    print(f"written to {write_page(options.out)} after {took:.0f} s; {counts}")
    if took > limit:
        print(f"the parts took more than the {limit} s that they have")
    return int(took > limit or any(row[1] in ("FAILED", "not tried") for row in rows))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: the processes of a part end with the script
    sys.exit(main())
