"""Compare the bytes a step that `trainkit plan` predicts with the counters of a network namespace of its own.

python benchmarks/plan_bytes.py [--only TEXT]

It needs root: the ranks of a run share the loopback device of a namespace, and the kernel counts what they send.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import report
from tests.strategies.test_traffic import CASES, STEPS, loopback_bytes, mean_wire_bytes, planned


def cells(name: str) -> list[str]:
    """Return the bytes a step of a case: of the tensors and on the wire as planned, as counted, and the ratio."""
    traffic, (first, last) = planned(CASES[name]), STEPS
    with tempfile.TemporaryDirectory() as folder:
        counted = loopback_bytes(CASES[name], Path(folder) / "run")
    wire = mean_wire_bytes(traffic)
    tensors = sum(traffic.at(step).network_bytes() for step in range(first, last)) / (last - first)
    overrides = " ".join(
        key for key in CASES[name] if key.startswith(("model=lookup", "strategy", "precision", "numerics", "activ"))
    )
    return [f"`{overrides}`", f"{tensors:,.0f}", f"{wire:,.0f}", f"{counted:,.0f}", f"{wire / counted:.3f}"]


def write(rows: Sequence[Sequence[str]]) -> None:
    """Write the result."""
    first, last = STEPS
    head = ["training", "tensors planned", "wire planned", "wire counted", "planned / counted"]
    text = (
        f"Bytes a step of all ranks, over the steps {first + 1} to {last} of a run. The wire has headers too, counted "
        "as 1,000 bytes a message and rank. An MLP "
        "with 301,066 parameters, with `tensor_parallel` a GPT of two blocks, and a table of 60,000 x 64 with sparse "
        "gradients, whose 2,048 lookups a step are nearly all of different rows. The trainings are `CASES` of "
        "`tests/strategies/test_traffic.py`."
    )
    command = "python benchmarks/plan_bytes.py"
    title = "Bytes that `trainkit plan` predicts, against a network namespace"
    report.write("plan_bytes", title, command, f"{text}\n\n{report.table(head, rows)}")


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="cases whose name holds this; prints, and writes nothing")
    options = parser.parse_args()
    rows = []
    for name in CASES:
        if options.only in name:
            rows.append(cells(name))
            print(f"{name}: {', '.join(rows[-1])}", flush=True)
    if not options.only:
        write(rows)


if __name__ == "__main__":
    main()
