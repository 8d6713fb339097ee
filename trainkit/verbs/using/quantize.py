"""`trainkit quantize RUN --to FORMAT`: write the trained model of a run with fewer bits, and compare it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from trainkit.config.grammar import refusal
from trainkit.verbs.support.call import Add, Call, checkpoint_flag, whole

_TO: Final = "the format: int8_weight, int8_dynamic, int4_weight or int8_static"


def add_flags(add: Add) -> None:
    """Add the flags of this verb."""
    add("--to", metavar="FORMAT", help=_TO)
    about = "int8_static: number of training samples whose activations are observed; 512 without it"
    add("--calibrate", metavar="N", type=whole(1), help=about)
    checkpoint_flag(add)


def run(call: Call) -> int:
    """Write the quantized model, and print its scores next to those of the original."""
    call.check_arity(arguments=1, overrides=False)
    if "to" not in call.flags:
        raise refusal("--to", f"is missing: {_TO}.")
    from trainkit.api.quantize import quantize_run  # noqa: PLC0415 - imports torch
    from trainkit.report.tables import print_rows  # noqa: PLC0415 - not for --help
    from trainkit.storage import quoted  # noqa: PLC0415 - for this only

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
