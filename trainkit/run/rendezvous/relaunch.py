"""Find the state that an external launch continues: the folder of its previous start, or that of `resume`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trainkit.cluster.launch import LaunchEnvironment
from trainkit.config.identity import fingerprint, run_config
from trainkit.config.schema import RunConfig
from trainkit.errors import ConfigError, CrashLoopError, LinkError, UnreadableError
from trainkit.files import Kind, expect_maps, parse_json, read_map, write_json_atomically
from trainkit.run.agent.policy import record_relaunch
from trainkit.run.backends.attempt import failure_in
from trainkit.run.begin import ResumePoint, adopt, find_start
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.folder.run_result import record_failure
from trainkit.run.rendezvous.barrier import ProcessBarrier

_KEY: Final = "folder"
_RAISED: Final[Mapping[str, Kind]] = {"task": str, "rank": int, "step": (int, type(None)), "text": str}
"""Fields that a group stores about the exceptions that ended it."""
ENDED: Final = ("finished", "stopped")
"""Statuses of a run that its launcher does not restart; a user who repeats the command wants another run."""


def resume_point_of_launch(cfg: RunConfig, run_dir: Path | None, barrier: ProcessBarrier) -> ResumePoint:
    """Find the resume point of the launch; for rank 0.

    A launcher that restarts its processes repeats their command, and expects them to continue. The folder of the launch
    is found in the launcher's store, or below `outputs/<name>/.launches` by the name of the launch.

    Raises:
        ConfigError: the path in `resume` does not exist, or is another training.
    """
    launch = barrier.launch
    for path in (barrier.load_from_previous(_KEY), _recorded(cfg, launch), run_dir if launch.attempt else None):
        start = None if path is None else _continued(cfg, Path(path))
        if start is not None:
            return start
    return find_start(cfg, run_dir)


def record_run_folder(cfg: RunConfig, folder: RunFolder, barrier: ProcessBarrier) -> None:
    """Record the folder for the next start of this launch."""
    path = str(folder.path.absolute())
    barrier.store_for_relaunch(_KEY, path)
    if barrier.launch.name:
        record = _record(cfg, barrier.launch)
        record.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomically(record, {"launch": barrier.launch.name, "folder": path})


def clear_run_folder(cfg: RunConfig, folder: RunFolder, barrier: ProcessBarrier) -> None:
    """Delete the record of a launch that has ended and is not restarted; the record of another folder stays."""
    if _recorded(cfg, barrier.launch) == str(folder.path.absolute()):
        _record(cfg, barrier.launch).unlink(missing_ok=True)


def _continued(cfg: RunConfig, path: Path) -> ResumePoint | None:
    """Return a start that continues in a folder, if it holds this training, and the training has not ended."""
    folder = RunFolder(path)
    result = folder.read_result()
    if not folder.resolved.is_file() or (result is not None and result.get("status") in ENDED):
        return None
    try:
        earlier = run_config(path)
    except (ConfigError, UnreadableError):
        return None
    adopted = adopt(cfg, earlier)
    if fingerprint(adopted) != fingerprint(earlier):
        return None
    note = f"restarted by the launcher: continues {path}"
    return ResumePoint(cfg=adopted, folder=folder, note=note, relaunched=True)


def note_restart_of(folder: RunFolder, barrier: ProcessBarrier) -> None:
    """Record that the launcher has restarted all processes; for rank 0, before it writes the initial files of the
    folder.

    Raises:
        CrashLoopError: user code raised the same exception twice in the same place. If the launcher restarts the
            processes even so, they end in the same way at once.
    """
    failure, key = failure_in(folder), "raised"
    headline, rank = (None, None) if failure is None else (failure.headline, failure.rank)
    relaunch = record_relaunch(folder, headline, rank, before=_raised_before(barrier, key))
    if relaunch.refusal is not None and failure is not None:
        error = CrashLoopError(f"{relaunch.refusal}: {failure.error()}")
        record_failure(folder, error)
        raise error
    barrier.store_for_relaunch(key, json.dumps(relaunch.to_json()))


def _raised_before(barrier: ProcessBarrier, key: str) -> list[dict[str, Any]]:
    try:
        found = expect_maps(parse_json(barrier.load_from_previous(key) or "[]"), _RAISED)
    except ValueError as error:
        raise LinkError(f"the store of the launch holds no message of this launch under {key}: {error}") from None
    return [{name: one[name] for name in _RAISED} for one in found]


def _record(cfg: RunConfig, launch: LaunchEnvironment) -> Path:
    name = re.sub(r"[^A-Za-z0-9._-]", "_", launch.name)
    return Path("outputs") / cfg.name / ".launches" / f"{name}.json"


def _recorded(cfg: RunConfig, launch: LaunchEnvironment) -> str | None:
    if not launch.name:
        return None
    try:
        return str(read_map(_record(cfg, launch), {"folder": str})["folder"])
    except UnreadableError:
        return None
