"""`trainkit quantize RUN --to FORMAT`: write the trained model of a run with fewer bits, and compare it."""

from __future__ import annotations

import sys
from pathlib import Path

from trainkit.config.grammar import refusal
from trainkit.files import quoted
from trainkit.report.tables import print_rows
from trainkit.trained.quantize import quantize_run
from trainkit.verbs.support.call import Call
from trainkit.verbs.support.table import QUANTIZED


def run(call: Call) -> int:
    """Write the quantized model, and print its scores next to those of the original."""
    if "to" not in call.flags:
        raise refusal("--to", f"is missing: {QUANTIZED}.")

    done = quantize_run(
        Path(call.arguments[0]).expanduser(),
        to=call.flags["to"],
        calibrate=call.flags.get("calibrate"),
        checkpoint=call.flags.get("checkpoint", "last"),
        report=lambda line: print(line, file=sys.stderr, flush=True),  # noqa: T201 - meant for the terminal
    )
    (header, *rows), count = done.rows, len(done.layers)
    print_rows(header, rows)
    sys.stdout.write(
        f"{count} layer{'' if count == 1 else 's'} quantized: {done.share['linear']:.1%} of the weights of linear "
        f"layers, {done.share['all']:.1%} of all parameters\n"
    )
    sys.stdout.write(f"{done.folder}\ntrainkit.load({quoted(done.folder)})\n")
    return 0
