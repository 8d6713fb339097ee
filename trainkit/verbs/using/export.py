"""`trainkit export RUN [--to FORMAT]`: write the trained model of a run for use outside of trainkit."""

from __future__ import annotations

import sys
from pathlib import Path

from trainkit.files import num_bytes, quoted
from trainkit.report.numbers import duration
from trainkit.trained.export import export_run
from trainkit.verbs.support.call import Call


def run(call: Call) -> int:
    """Write the model, and print its path."""
    to = call.flags.get("to", "safetensors")
    done = export_run(Path(call.arguments[0]).expanduser(), to=to, checkpoint=call.flags.get("checkpoint"))
    sys.stdout.write(f"{done.folder}  {num_bytes(done.num_bytes)} in {duration(done.seconds)}\n")
    sys.stdout.writelines(f"{note}\n" for note in done.notes)
    sys.stdout.write(f"trainkit.load({quoted(done.folder)})\n" if to == "safetensors" else "")
    return 0
