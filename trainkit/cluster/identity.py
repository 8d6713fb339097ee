"""Which task this process is: handed from the supervisor to its workers in the environment, as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from trainkit.cluster.tasks import Task
from trainkit.config.texts import whole_number
from trainkit.errors import MISSING, ConfigError, Problem

__all__ = ["VARIABLES", "Identity"]

VARIABLES: Final = (
    "TRAINKIT_RANK",
    "TRAINKIT_RANKS",
    "TRAINKIT_ROLE",
    "TRAINKIT_INDEX",
    "TRAINKIT_DEVICE",
    "TRAINKIT_STORE",
    "TRAINKIT_PREFIX",
    "TRAINKIT_ATTEMPT",
    "TRAINKIT_LIFE",
    "TRAINKIT_HOST",
    "TRAINKIT_TOKEN",
)
"""Every environment variable that `Identity.to_environ` writes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """The task of a process, and how it finds the others.

    Example:
        >>> Identity.from_environ({"TRAINKIT_RANK": "1", "TRAINKIT_RANKS": "2"}).task.rank
        1
        >>> Identity.from_environ({}) == Identity.solo()
        True
    """

    task: Task
    num_ranks: int = 1
    """Processes of this run, over all roles."""
    store: tuple[str, int] | None = None
    """Host and port of the rendezvous store; None where there is nobody to meet."""
    prefix: str = ""
    """The prefix of every key in the store: fresh for every attempt, so that no address of a dead peer is read."""
    attempt: int = 0
    """0 at the first start, then one more for every restart; above 0 the newest checkpoint is continued."""
    life: int = 0
    """Times that this task was started again alone in this attempt, while the others went on."""
    host: str = "127.0.0.1"
    """The name or address of this host by which the others reach it; loopback where all are on one."""
    token: str = field(default="", repr=False)
    """What the tasks of this run know and nobody else does; empty where nobody made one."""

    @classmethod
    def solo(cls, device: str = "cpu") -> Identity:
        """The identity of a run that is one process."""
        return cls(task=Task(role="worker", index=0, rank=0, device=device))

    def to_environ(self) -> dict[str, str]:
        """The environment variables that `from_environ` reads back."""
        store = {} if self.store is None else {"TRAINKIT_STORE": f"{self.store[0]}:{self.store[1]}"}
        token = {"TRAINKIT_TOKEN": self.token} if self.token else {}
        return {
            "TRAINKIT_RANK": str(self.task.rank),
            "TRAINKIT_RANKS": str(self.num_ranks),
            "TRAINKIT_ROLE": self.task.role,
            "TRAINKIT_INDEX": str(self.task.index),
            "TRAINKIT_DEVICE": self.task.device,
            "TRAINKIT_PREFIX": self.prefix,
            "TRAINKIT_ATTEMPT": str(self.attempt),
            "TRAINKIT_LIFE": str(self.life),
            "TRAINKIT_HOST": self.host,
            **store,
            **token,
        }

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Identity:
        """Read an identity; without `TRAINKIT_RANK`, that of a run of one process.

        Args:
            environ: `os.environ`, or what stands for it in a test. `TRAINKIT_ROLE` is worker, `TRAINKIT_INDEX` the
                rank and `TRAINKIT_DEVICE` cpu where not set.

        Raises:
            ConfigError: a variable is no number, a rank lies outside the ranks, the store no HOST:PORT:
                every problem at once.
        """
        if "TRAINKIT_RANK" not in environ:
            return cls.solo(environ.get("TRAINKIT_DEVICE", "cpu"))
        problems: list[Problem] = []
        rank = _number(environ, "TRAINKIT_RANK", None, problems)
        num_ranks = _number(environ, "TRAINKIT_RANKS", 1, problems)
        index = _number(environ, "TRAINKIT_INDEX", rank, problems)
        attempt = _number(environ, "TRAINKIT_ATTEMPT", 0, problems)
        life = _number(environ, "TRAINKIT_LIFE", 0, problems)
        store = _store(environ, problems)
        if not problems and rank >= num_ranks:
            rule = f"ranks go from 0 to TRAINKIT_RANKS - 1 = {num_ranks - 1}."
            problems.append(Problem(key="TRAINKIT_RANK", value=rank, rule=rule, origin="environment"))
        if problems:
            raise ConfigError(problems)
        role, device = environ.get("TRAINKIT_ROLE", "worker"), environ.get("TRAINKIT_DEVICE", "cpu")
        return cls(
            task=Task(role=role, index=index, rank=rank, device=device),
            num_ranks=num_ranks,
            store=store,
            prefix=environ.get("TRAINKIT_PREFIX", ""),
            attempt=attempt,
            life=life,
            host=environ.get("TRAINKIT_HOST", "127.0.0.1"),
            token=environ.get("TRAINKIT_TOKEN", ""),
        )


def _number(environ: Mapping[str, str], name: str, default: int | None, problems: list[Problem]) -> int:
    text = environ.get(name, "" if default is None else str(default))
    number = whole_number(text, low=0, high=2**31 - 1)
    if number is not None:
        return number
    rule = "must be a whole number, 0 or more."
    problems.append(Problem(key=name, value=text or MISSING, rule=rule, origin="environment"))
    return 0


def _store(environ: Mapping[str, str], problems: list[Problem]) -> tuple[str, int] | None:
    text = environ.get("TRAINKIT_STORE", "")
    if not text:
        return None
    host, _, port = text.rpartition(":")
    number = whole_number(port, low=1, high=65535)
    if host and number is not None:
        return host, number
    rule = "must be HOST:PORT, as in 127.0.0.1:29400."
    problems.append(Problem(key="TRAINKIT_STORE", value=text, rule=rule, origin="environment"))
    return None
