"""`trainkit predict RUN --out FILE`: write the outputs of a trained model for every sample, in order, exactly once."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from trainkit.config.grammar import refusal
from trainkit.trainer.ownership import print_notice
from trainkit.verbs.running.train import template_of_job
from trainkit.verbs.support.call import Call
from trainkit.verbs.using.evaluate import job_arguments


def run(call: Call) -> int:
    """Predict, or continue an interrupted prediction; return the exit code."""
    if "out" not in call.flags:
        raise refusal("--out", "is missing: --out FILE.parquet, FILE.npy or FILE.jsonl.")
    from trainkit.api.jobs import predict_to_file  # noqa: PLC0415 - imports torch
    from trainkit.report.numbers import duration  # noqa: PLC0415 - not for --help
    from trainkit.run.signals import EXIT_CODES  # noqa: PLC0415 - the same

    begun = time.perf_counter()
    with template_of_job(call):
        out = Path(call.flags["out"]).expanduser()
        result = predict_to_file(job_arguments(call), out=out, overwrite="overwrite" in call.flags)
    if result.status != "finished":
        print_notice(f"{result.status} after {result.num_done:,} of {result.num_rows:,} rows. Continue: {call.command}")
        return EXIT_CODES.get(result.status, 1)
    files, seconds = " and ".join(map(str, result.files)), time.perf_counter() - begun
    sys.stdout.write(f"{result.num_rows:,} rows in {duration(seconds)}: {files}\n")
    if result.num_nonfinite:
        print_notice(f"note: {result.num_nonfinite:,} of {result.num_rows:,} rows contain NaN or infinity.")
    return 0
