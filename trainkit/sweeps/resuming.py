"""Which results can be reused: the identity of a job, over all keys that are not cosmetic."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

from trainkit.config.identity import tag_of
from trainkit.config.provenance import dotted, leaves
from trainkit.config.schema import RunConfig
from trainkit.config.secrets.keys import secret_keys
from trainkit.config.secrets.secrets import redacted
from trainkit.fields import Tag
from trainkit.moved import with_original_targets
from trainkit.redaction import variable_of

_OF_THE_SWEEP: Final = "sweep"


def identity(cfg: RunConfig) -> str:
    """Return a hash that is equal for two configs if the result of one can stand for the other's.

    `name`, keys of logging and saving, and keys about the sweep as a whole do not count. Placement and speed do count,
    unlike in the fingerprint: a sweep over strategies has separate points. Secrets do not count.

    Example:
        >>> one, other = RunConfig(name="a"), RunConfig(name="b", log_every_steps=3)
        >>> identity(one) == identity(other) != identity(RunConfig(seed=1))
        True
    """
    secrets = secret_keys(cfg.to_dict())
    counted = {
        dotted(path): _canonical(value)
        for path, value in leaves(redacted(cfg.to_dict())[0])
        if path not in secrets
        and variable_of(value) is None
        and path[0] != _OF_THE_SWEEP
        and tag_of(cfg, path).tag is not Tag.cosmetic
    }
    text = json.dumps(with_original_targets(counted), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _canonical(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value
