"""`trainkit export RUN [--to FORMAT]`: write the trained model of a run for use outside of trainkit."""

from __future__ import annotations

import sys
from pathlib import Path

from trainkit.verbs.support.call import Add, Call, checkpoint_flag


def add_flags(add: Add) -> None:
    """Add the flags of this verb."""
    about = "the format: safetensors without it; torch_export, onnx, huggingface: into RUN/exports/FORMAT"
    add("--to", metavar="FORMAT", help=about)
    checkpoint_flag(add, "the checkpoint: last, or best; last without it. safetensors writes both")


def run(call: Call) -> int:
    """Write the model, and print its path."""
    call.check_arity(arguments=1, overrides=False)
    from trainkit.run.folder.export import export_run  # noqa: PLC0415 - imports torch
    from trainkit.storage import num_bytes, quoted  # noqa: PLC0415 - for this only

    to = call.flags.get("to", "safetensors")
    done = export_run(Path(call.arguments[0]).expanduser(), to=to, checkpoint=call.flags.get("checkpoint"))
    sys.stdout.write(f"{done.folder}  {num_bytes(done.num_bytes)} in {done.seconds:.2g} s\n")
    sys.stdout.writelines(f"{note}\n" for note in done.notes)
    sys.stdout.write(f"trainkit.load({quoted(done.folder)})\n" if to == "safetensors" else "")
    return 0
