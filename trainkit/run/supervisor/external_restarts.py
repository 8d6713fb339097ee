"""Record restarts by a launcher or a process backend, which restarts all processes without knowing what failed.

Rank 0 of the new group finds the error reports of the last one in the run folder. It records the restart, and refuses
it if user code raised the same exception twice in the same place.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from trainkit.cluster.tasks import Task
from trainkit.run.folder.restart_record import Restart, record_restart
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.supervisor.restart_policy import RaisedError, raised_by, repeated
from trainkit.trainer.manifest import list_complete


@dataclass(frozen=True, kw_only=True)
class ExternalRestart:
    """The exceptions of the earlier groups, and whether the new group may begin."""

    raised: frozenset[RaisedError]
    """The exceptions of all earlier groups."""
    refusal: str | None
    """Why the group does not begin; None: it does."""

    def to_json(self) -> list[dict[str, Any]]:
        """Return the exceptions as JSON for the next group."""
        return [asdict(one) for one in self.raised]


def record_relaunch(
    folder: RunFolder,
    headline: str | None,
    rank: int | None,
    *,
    before: Collection[dict[str, Any]],
    tolerant: bool = False,
) -> ExternalRestart:
    """Record that all tasks were restarted; return whether they may begin.

    Args:
        folder: the run folder, with the error reports of the last group.
        headline: how the last group failed; None: it left no report.
        rank: which of its ranks failed.
        before: `ExternalRestart.to_json` of the last group.
        tolerant: whether a repeated failure is restarted: elastic runs continue without the host that fails.
    """
    ranks = [path.name.split("_")[1].partition(".")[0] for path in folder.live.glob("rank_*.error.json")]
    tasks = [Task(role="rank", index=int(one), rank=int(one)) for one in sorted(ranks) if one.isdigit()]
    found = frozenset(raised for task in tasks if (raised := raised_by(folder, task)) is not None)
    if not any(one.rank == rank for one in found):
        found = frozenset()
    known = frozenset(RaisedError(**one) for one in before)
    refusal = None if tolerant else repeated(found & known)
    if refusal is None:
        newest = list_complete(folder.checkpoints)
        step = next((one.step for one in found if one.rank == rank), None)
        restart = Restart(
            kind="all",
            cause=headline or "The processes were gone.",
            step=step,
            rank=rank,
            checkpoint=newest[0].step if newest else None,
        )
        record_restart(folder.path, restart)
    return ExternalRestart(raised=found | known, refusal=refusal)
