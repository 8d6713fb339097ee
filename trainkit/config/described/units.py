"""The unit of a key that holds a quantity: declared by its annotation, or known by its name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from trainkit.config.annotations import holds_quantity
from trainkit.fields import Unit

NO_UNIT: Final = "none"
"""The unit of a key that holds no quantity: text, a choice, a path, true or false, an index."""
PLAIN_NUMBER: Final = "a plain number"
"""The unit of a factor, a rate or a seed."""
_NAMES: Final[Mapping[str, str]] = {
    "10^9 bytes/s": r"(.*_)?gb_s",
    "10^6 bytes/s": r"(.*_)?mb_s",
    "10^12 operations/s": r"tflops",
    "seconds": r"(.*_)?s",
    "microseconds": r"(.*_)?us",
    "US dollars an hour": r"(.*_)?usd_h",
    "GiB": r"(.*_)?gib|max_memory",
    "MiB": r"(.*_)?(mb|mib)",
    "bytes": r"(.*_)?bytes",
    "epochs": r"(.*_)?epochs|every_epochs",
    "steps": r"(.*_)?(steps|every|after)|stop_at_step|start_step|max_skips_in_a_row|timescale|growth_interval|bound",
    "a share, 0 to 1": r"(.*_)?share|dropout|label_smoothing|min_area|milestones|decay",
    "samples": r"(.*_)?(batch_size|samples|val_size|global_size|micro_size|reference_batch)",
    "tokens": r"(.*_)?context|stride|vocab_size|num_tokens",
    "pixels": r"image_size|resize",
    "channels": r"(in_)?channels|widths",
    "units": r"hidden|width",
    "features": r"(in|out)_features",
    "classes": r"num_classes",
    "images": r"num_images",
    "blocks": r"num_layers",
    "heads": r"num_heads",
    "numbers": r"latent",
    "shards": r"accumulation",
    "sums": r"lanes",
    "batches": r"prefetch",
    "processes": r"num_workers|workers|servers",
    "threads": r"threads",
    "cores": r"cpus_per_replica",
    "replicas": r"(.*_)?replicas",
    "groups": r"replicate",
    "ranks": r"stages|degree",
    "stages": r"virtual_stages",
    "devices": r"devices_per_worker",
    "GPUs": r"num_gpus",
    "jobs": r"reduction|slots|jobs_per_device",
    "points": r"trials",
    "parts": r"folds",
    "checkpoints": r"keep_(last|best)",
    "evaluations": r"patience|cooldown",
    "overflows": r"max_overflows",
    "restarts": r"retries|max_restarts",
}
"""Unit -> the names of keys, of trainkit's classes and of torch's, that have it; any other key is a plain number."""


def unit_of(name: str, hint: Any) -> str:
    """Return the unit of a key; `NO_UNIT` for a key that holds no quantity.

    Args:
        name: the last part of the key.
        hint: its annotation, which may declare the unit: `Annotated[float, unit("GiB")]`.

    Example:
        >>> unit_of("timeout_s", float), unit_of("workers", int | None), unit_of("size", int), unit_of("path", str)
        ('seconds', 'processes', 'a plain number', 'none')
    """
    declared = next((extra.name for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Unit)), None)
    if declared is not None or not holds_quantity(hint):
        return declared or NO_UNIT
    return next((unit for unit, names in _NAMES.items() if re.fullmatch(names, name)), PLAIN_NUMBER)
