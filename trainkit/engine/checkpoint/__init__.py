"""Checkpoints that never lie: atomic, hashed, verified before use, never pickled.

saver = BackgroundSaver(root, retention=Retention(keep_last=2, keep_best=1, mode="max"))
saver.save(step=100, tensors=tensors, meta=meta, metric=0.97)     # costs the copy to the host
saver.close()                                                     # waits for the disk
loaded = newest_valid(root, report=print)                         # names a damaged one, uses the one before
"""

from __future__ import annotations

from trainkit.engine.checkpoint.background import BackgroundSaver
from trainkit.engine.checkpoint.judged import Judged, exclusive
from trainkit.engine.checkpoint.loading import Loaded, load, load_below, newest_valid
from trainkit.engine.checkpoint.retention import Retention
from trainkit.engine.checkpoint.saving import Part, begin, commit, prune, save, write_part
from trainkit.engine.checkpoint.space import bytes_needed, refuse_small_disk
from trainkit.engine.checkpoint.together import SaverOfPieces
from trainkit.engine.checkpoint.weights import sha256_of_pieces, weights_sha256
from trainkit.engine.manifest import Checkpoint, read_manifest, scan

__all__ = [
    "BackgroundSaver",
    "Checkpoint",
    "Judged",
    "Loaded",
    "Part",
    "Retention",
    "SaverOfPieces",
    "begin",
    "bytes_needed",
    "commit",
    "exclusive",
    "load",
    "load_below",
    "newest_valid",
    "prune",
    "read_manifest",
    "refuse_small_disk",
    "save",
    "scan",
    "sha256_of_pieces",
    "weights_sha256",
    "write_part",
]
