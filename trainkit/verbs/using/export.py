"""`trainkit export RUN [--to FORMAT]`: write the trained model of a run for use outside of trainkit."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from trainkit.verbs.support.call import Call, Flag

USAGE: Final = "RUN"
FLAGS: Final[Mapping[str, Flag]] = {
    "to": Flag(
        help="the format: safetensors without it; torch_export, onnx, huggingface: into RUN/exports/FORMAT",
        value="FORMAT",
    ),
    "checkpoint": Flag(help="the checkpoint: last, or best; last without it. safetensors writes both", value="WHICH"),
}


def run(call: Call) -> int:
    """Write the model, and print its path."""
    call.check_arity(arguments=1, overrides=False)
    which = call.checkpoint() if "checkpoint" in call.flags else None
    from trainkit.run.folder.export import export_run  # noqa: PLC0415 - imports torch
    from trainkit.storage import num_bytes, quoted  # noqa: PLC0415 - for this only

    to = call.flags.get("to", "safetensors")
    done = export_run(Path(call.arguments[0]).expanduser(), to=to, checkpoint=which)
    sys.stdout.write(f"{done.folder}  {num_bytes(done.num_bytes)} in {done.seconds:.2g} s\n")
    sys.stdout.writelines(f"{note}\n" for note in done.notes)
    sys.stdout.write(f"trainkit.load({quoted(done.folder)})\n" if to == "safetensors" else "")
    return 0
