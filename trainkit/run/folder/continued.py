"""Give a new run what it continues from the folder of another run: checkpoints, and the rows of the steps before."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from trainkit.callbacks.every_run import keep_until
from trainkit.callbacks.histograms import FILE as HISTOGRAMS
from trainkit.errors import CheckpointError
from trainkit.files import naming, open_regular, refuse_link
from trainkit.run.folder.run_folder import RunFolder
from trainkit.trainer.checkpoint.saving import bring, prune
from trainkit.trainer.checkpoint.tensors import load
from trainkit.trainer.manifest import MANIFEST, EvaluatedIndex, Retention, list_complete

_ROWS: Final = ("metrics.jsonl", "tables.jsonl", "evaluations.jsonl", HISTOGRAMS)
"""Files of a run with a line for each step or evaluation."""


def bring_earlier_steps(folder: RunFolder, source: Path, retention: Retention) -> str:
    """Bring the steps before a checkpoint into a new run folder, so that the run there is the whole training.

    These are the checkpoints that the new run would keep (the one that it starts from, those before it, and the best),
    the rows of its metrics and tables, and the events of TensorBoard. The other folder does not change, and is not
    needed afterwards.

    Args:
        folder: the new run folder, which has its token.
        source: the `checkpoints` folder of the other run, or one checkpoint in it.
        retention: the rule of the new run.

    Returns:
        A line about the start.

    Raises:
        CheckpointError: there is no checkpoint, or the named one is damaged.
        UnreadableError: a file of the other run is not a regular file.
        StorageError: a file cannot be written.
    """
    if (source / MANIFEST).is_file():
        root, start = source.parent, [load(source).checkpoint]
    else:
        root, start = source, list_complete(source)[:1]
    if not start:
        raise CheckpointError(f"{source} holds no checkpoint.")
    step, judged, owner = start[0].step, EvaluatedIndex.read(root), folder.take()
    found = [judged.of(one) for one in [*start, *(one for one in list_complete(root) if one.step < step)]]
    kept = {one.folder: one for one in [*found[: retention.keep_last], *retention.ranked(found)[: retention.keep_best]]}
    for checkpoint in sorted(kept.values(), key=lambda one: one.step):
        bring(checkpoint, folder.checkpoints, owner)
    prune(folder.checkpoints, retention, step=step, owner=owner)  # this names the last and the best
    for name in _ROWS:
        keep_until(folder.path / name, step, source=root.parent / name)
    events = root.parent / "tensorboard"
    for file in sorted([*events.glob("events.out.tfevents.*"), *events.glob("*/events.out.tfevents.*")]):
        if file.name.endswith(".hparams"):  # the settings of a job of a sweep
            continue
        for parent in {events, file.parent}:
            refuse_link(parent)
        copy = folder.tensorboard / file.relative_to(events)
        with naming(copy), open_regular(file) as old:
            copy.parent.mkdir(parents=True, exist_ok=True)
            with open_regular(copy, "wb") as new:
                shutil.copyfileobj(old, new)
    return (
        f"resume: starts at step {step:,} of {root.parent}; its checkpoints, rows and TensorBoard "
        "events up to there are part of this folder"
    )
