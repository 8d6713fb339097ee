"""Checkpoints: atomic, hashed, verified before use, never pickled.

saver = BackgroundSaver(root, policy=SavePolicy(retention=Retention(keep_last=2, keep_best=1, mode="max")))
saver.save(step=100, tensors=tensors, meta=meta, metric=0.97)   # waits only for the copy to the host
saver.close()                                                   # waits for the disk
loaded = newest_valid(root, report=print)                       # reports a damaged one, uses the previous one
"""

from __future__ import annotations

from trainkit.trainer.checkpoint.background import BackgroundSaver, ShardedSaver
from trainkit.trainer.checkpoint.loading import Loaded, load, load_below, manifest_below, meta_of, newest_valid
from trainkit.trainer.checkpoint.retention import EvaluatedIndex, Retention, exclusive
from trainkit.trainer.checkpoint.saving import CheckpointPart, SavePolicy, begin, bring, commit, prune, save, write_part
from trainkit.trainer.checkpoint.tensor_file import sha256_of_pieces, weights_sha256
from trainkit.trainer.manifest import Checkpoint, list_complete, read_manifest

__all__ = [
    "BackgroundSaver",
    "Checkpoint",
    "CheckpointPart",
    "EvaluatedIndex",
    "Loaded",
    "Retention",
    "SavePolicy",
    "ShardedSaver",
    "begin",
    "bring",
    "commit",
    "exclusive",
    "list_complete",
    "load",
    "load_below",
    "manifest_below",
    "meta_of",
    "newest_valid",
    "prune",
    "read_manifest",
    "save",
    "sha256_of_pieces",
    "weights_sha256",
    "write_part",
]
