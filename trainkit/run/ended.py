"""Call the hook `ended` of the callbacks in the process that started a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from trainkit.config.schema import RunConfig
from trainkit.config.targets.build import build, class_built_by
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.signals import status_of_error
from trainkit.trainer.events import Callback, Ending

_log = logging.getLogger(__name__)


@contextmanager
def ended_hooks(cfg: RunConfig, folder: RunFolder) -> Iterator[None]:
    """Call the hook of the callbacks that have it, after the block, however that ends; their errors are warnings."""
    try:
        yield
    except BaseException as error:
        _call(cfg, folder, status_of_error(error), str(error))
        raise
    else:
        result = folder.read_result() or {}
        _call(cfg, folder, str(result.get("status", "stopped")), str(result.get("reason") or ""))


def _call(cfg: RunConfig, folder: RunFolder, status: str, reason: str) -> None:
    nodes = {("callbacks", name): node for name, node in cfg.callbacks.items()}
    nodes |= {("logger", name): node for name, node in cfg.logger.items()}
    steps = (folder.read_result() or {}).get("steps")
    ending = Ending(
        name=cfg.name,
        folder=folder.path,
        status=status,
        reason=next(iter(reason.splitlines()), ""),
        steps=steps if isinstance(steps, int) else None,
    )
    for (group, name), node in nodes.items():
        try:
            kind = class_built_by(node)
            if kind is not None and getattr(kind, "ended", Callback.ended) is not Callback.ended:
                build(node, group).ended(ending)
        except Exception as error:  # noqa: BLE001 - the run has ended, and its exit code tells how
            _log.warning("%s.%s failed in ended: %s: %s", group, name, type(error).__name__, error)
