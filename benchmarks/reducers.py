"""Measure an exchange: every reducer of `strategy.reduce`, by size of the gradients and number of CPU processes.

    python benchmarks/reducers.py [--rounds 15] [--ranks 2,4]

The processes are started together, with one thread each; each reducer sums the same vectors in turns, and the median
over rounds of the slower rank counts. Nothing is computed meanwhile: this is the waiting time of a step without
overlap.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import socket
import statistics
import sys
import time
from pathlib import Path
from queue import Queue
from typing import Any, get_args

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import spawn

from benchmarks import report
from trainkit.cluster.tasks import Identity, Task
from trainkit.strategies.base import Numerics
from trainkit.strategies.data_parallel.strategy import Mirrored
from trainkit.strategies.reducers.options import Reduce
from trainkit.strategies.rendezvous_store import HostedStore
from trainkit.strategies.tensors.layouts import FlatBuffer

REDUCERS = [name for name in get_args(Reduce) if name not in {"auto", "hierarchical"}]  # of several hosts
SIZES_MB = (0.04, 0.4, 3.2, 25.0, 100.0)


def rank_of(rank: int, num_ranks: int, port: int, rounds: int, results: Queue[Any]) -> None:
    """Run one process: every size and reducer; rank 0 reports the milliseconds."""
    task = Task(role="worker", index=rank, rank=rank)
    identity = Identity(task=task, num_ranks=num_ranks, store=("127.0.0.1", port), prefix="bench")
    collective = Mirrored(timeout_s=60).join(identity).all_ranks
    for size in SIZES_MB:
        packing = FlatBuffer([torch.Size([int(size * 2**18) // 8])] * 8, torch.float32, torch.device("cpu"))
        grads = [torch.ones(shape) for shape in packing.shapes]
        for name in REDUCERS:
            reducer: Any = Mirrored(reduce=name, timeout_s=60).make_reducer(collective, Numerics())
            seconds = []
            for _ in range(rounds + 2):
                collective.gather(torch.zeros(1))
                start = time.perf_counter()
                reducer.begin(packing, num_shards=num_ranks)
                reducer.add(0, grads)
                reducer.finish()
                seconds.append(time.perf_counter() - start)
            reducer.close()
            slowest = torch.cat(collective.gather(torch.tensor([statistics.median(seconds[2:])]))).max()
            if rank == 0:
                results.put((num_ranks, size, name, float(slowest) * 1e3))
    collective.gather(torch.zeros(1))
    if rank == 0:
        results.put(None)


def measure(num_ranks: int, rounds: int) -> dict[tuple[float, str], float]:
    """Return milliseconds of an exchange by size and reducer."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    results: Any = mp.get_context("spawn").SimpleQueue()
    times: dict[tuple[float, str], float] = {}
    with HostedStore(("127.0.0.1", port)) as store:
        store.open()
        arguments = (num_ranks, port, rounds, results)
        processes = spawn(rank_of, args=arguments, nprocs=num_ranks, join=False)  # type: ignore[no-untyped-call]
        while (row := results.get()) is not None:
            times[row[1], row[2]] = row[3]
        processes.join()
    return times


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ranks", default="2,4")
    arguments = parser.parse_args()
    rows = []
    for num_ranks in map(int, arguments.ranks.split(",")):
        times = measure(num_ranks, arguments.rounds)
        rows += [[str(num_ranks), f"{size:g}", *(f"{times[size, name]:.3g}" for name in REDUCERS)] for size in SIZES_MB]
    report.write(
        "reducers",
        "Milliseconds of an exchange of gradients between CPU processes of one host",
        f"python benchmarks/reducers.py --rounds {arguments.rounds} --ranks {arguments.ranks}",
        report.table(["processes", "MiB", *REDUCERS], rows),
    )


if __name__ == "__main__":
    main()
