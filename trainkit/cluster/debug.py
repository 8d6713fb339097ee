"""One rank of a run in the terminal's process, for a debugger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Final

from trainkit.cluster.base import Cluster
from trainkit.cluster.local import refuse_launched
from trainkit.cluster.tasks import Task
from trainkit.config.schema import RunConfig
from trainkit.errors import ConfigError, Problem
from trainkit.fields import at_least, placement

_FOREVER_S: Final = 30 * 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Debug(Cluster):
    """One rank in the process of the terminal, on this machine: `breakpoint()` stops it, and no time limit ends it."""

    rank: Annotated[int, placement, at_least(0)] = 0
    """The rank in the terminal; the others write into the logs of the run folder."""

    def launch(self, environ: Mapping[str, str]) -> None:
        """Refuse an external launch: this process starts the other ranks.

        Raises:
            ConfigError: a launcher started this process among others.
        """
        refuse_launched(environ, "starts the other ranks itself", value="debug")

    def without_limits(self, cfg: RunConfig) -> RunConfig:
        """Return the config of a run whose ranks wait in exchanges for the one that a debugger holds."""
        if "timeout_s" not in cfg.strategy:
            return cfg
        return replace(cfg, strategy={**cfg.strategy, "timeout_s": _FOREVER_S})

    def refuse_absent_rank(self, tasks: Sequence[Task]) -> None:
        """Refuse to debug a rank that the run does not have.

        Raises:
            ConfigError: names the ranks that it has.
        """
        if self.rank >= len(tasks):
            names = ", ".join(f"{task.rank} ({task})" for task in tasks)
            rule = f"there is no such rank. There are: {names}."
            raise ConfigError([Problem(key="cluster.rank", value=self.rank, rule=rule)])
