"""Callbacks in the process that starts a run: their problems before it begins, and their hook `ended` after it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainkit.config.schema import RunConfig
from trainkit.config.targets.build import build, class_built_by
from trainkit.errors import Problem
from trainkit.run.signals import status_of_error
from trainkit.trainer.events import Callback, Ending
from trainkit.trainer.planned import Planned

_log = logging.getLogger(__name__)


def callback_problems(planned: Planned) -> list[Problem]:
    """Return the problems of the callbacks that validate a run; others are not built here.

    Args:
        planned: the run, with any key.
    """
    found: list[Problem] = []
    for name, node in planned.cfg.callbacks.items():
        kind = class_built_by(node)
        if kind is None or not issubclass(kind, Callback) or kind.validate is Callback.validate:
            continue
        key = f"callbacks.{name}"
        callback: Callback = build(node, key)
        found += callback.validate(replace(planned, key=key))
    return found


@contextmanager
def ended_hooks(cfg: RunConfig, folder: Path, read_result: Callable[[], Mapping[str, Any] | None]) -> Iterator[None]:
    """Call the hook of the callbacks that have it, after the block, even if it raises; their errors are warnings.

    Args:
        cfg: the config of the run.
        folder: the run folder.
        read_result: returns the content of `result.json`, or None if there is none.
    """
    try:
        yield
    except BaseException as error:
        _call(cfg, folder, read_result() or {}, status=status_of_error(error), reason=str(error))
        raise
    else:
        result = read_result() or {}
        status, reason = str(result.get("status", "stopped")), str(result.get("reason") or "")
        _call(cfg, folder, result, status=status, reason=reason)


def _call(cfg: RunConfig, folder: Path, result: Mapping[str, Any], *, status: str, reason: str) -> None:
    nodes = {("callbacks", name): node for name, node in cfg.callbacks.items()}
    nodes |= {("logger", name): node for name, node in cfg.logger.items()}
    steps = result.get("steps")
    ending = Ending(
        name=cfg.name,
        folder=folder,
        status=status,
        reason=next(iter(reason.splitlines()), ""),
        steps=steps if isinstance(steps, int) else None,
    )
    for (group, name), node in nodes.items():
        try:
            kind = class_built_by(node)
            if kind is not None and getattr(kind, "ended", Callback.ended) is not Callback.ended:
                build(node, group).ended(ending)
        except Exception as error:  # noqa: BLE001 - the run has ended, and its exit code is already determined
            _log.warning("%s.%s failed in ended: %s: %s", group, name, type(error).__name__, error)
