"""A task: one process of a run, with role, index, rank and device, and the addresses by which it reaches the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from trainkit.errors import ConfigError, Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One process of a run.

    Example:
        >>> str(Task(role="worker", index=1, rank=2, device="cuda:2"))
        'worker:1'
    """

    role: str
    """chief, worker, ps or evaluator; the synchronous strategies have workers only."""
    index: int
    """The number among the tasks of its role, from 0."""
    rank: int
    """The number among all tasks, from 0; rank 0 owns the run folder."""
    device: str = "cpu"
    """The device of its replica: `cpu`, `cuda:0`."""
    computes_on: tuple[str, ...] = field(default=(), repr=False)
    """The devices on which it computes, if they are not just that one."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Task:
        """Return the task whose fields, by `dataclasses.asdict`, were written as JSON."""
        return cls(**{**values, "computes_on": tuple(values["computes_on"])})

    @property
    def is_evaluator(self) -> bool:
        """Whether it evaluates the checkpoints of the others, which do not wait for it."""
        return self.role == "evaluator"

    def __str__(self) -> str:
        return f"{self.role}:{self.index}"


_TEXTS: Final = ("prefix", "attempt", "life", "host", "token")
"""Fields of an identity that are variables by their own name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """The task of a process, and the addresses by which it reaches the others.

    Example:
        >>> Identity.from_environ({"TRAINKIT_RANK": "1", "TRAINKIT_RANKS": "2"}).task.rank
        1
        >>> Identity.from_environ({}) == Identity.solo()
        True
    """

    task: Task
    num_ranks: int = 1
    """Number of processes of this run, over all roles."""
    store: tuple[str, int] | None = None
    """Host and port of the rendezvous store; None for a single process."""
    prefix: str = ""
    """The prefix of every key in the store: new for every attempt, so that no address of a dead process is read."""
    attempt: int = 0
    """0 at the first start, then one more per restart; above 0 the newest checkpoint is resumed."""
    life: int = 0
    """Number of restarts of this task alone in this attempt, while the others continued."""
    host: str = "127.0.0.1"
    """The name or address of this host for the others; loopback if all processes are on one host."""
    token: str = field(default="", repr=False)
    """A secret that only the tasks of this run know; empty if none was made."""

    @classmethod
    def solo(cls, device: str = "cpu") -> Identity:
        """Return the identity of a run with a single process."""
        return cls(task=Task(role="worker", index=0, rank=0, device=device))

    def to_environ(self) -> dict[str, str]:
        """Return the environment variables that `from_environ` reads."""
        task = self.task
        numbers = {"RANK": task.rank, "RANKS": self.num_ranks, "ROLE": task.role, "INDEX": task.index}
        values = {**numbers, "DEVICE": task.device, **{name.upper(): getattr(self, name) for name in _TEXTS}}
        values |= {} if self.store is None else {"STORE": f"{self.store[0]}:{self.store[1]}"}
        return {f"TRAINKIT_{name}": str(value) for name, value in values.items() if name != "TOKEN" or value}

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Identity:
        """Read an identity; without `TRAINKIT_RANK`, return the one of a run with a single process.

        Args:
            environ: `os.environ`, or a replacement in a test. If unset, `TRAINKIT_ROLE` is worker, `TRAINKIT_INDEX` the
                rank and `TRAINKIT_DEVICE` cpu.

        Raises:
            ConfigError: a variable is not a number, the rank is out of range, or the store is not HOST:PORT.
        """
        if "TRAINKIT_RANK" not in environ:
            return cls.solo(environ.get("TRAINKIT_DEVICE", "cpu"))
        rank, num_ranks = _number(environ, "TRAINKIT_RANK"), _number(environ, "TRAINKIT_RANKS", 1)
        if rank >= num_ranks:
            raise _refused("TRAINKIT_RANK", rank, f"ranks go from 0 to TRAINKIT_RANKS - 1 = {num_ranks - 1}.")
        task = Task(
            role=environ.get("TRAINKIT_ROLE", "worker"),
            index=_number(environ, "TRAINKIT_INDEX", rank),
            rank=rank,
            device=environ.get("TRAINKIT_DEVICE", "cpu"),
        )
        return cls(
            task=task,
            num_ranks=num_ranks,
            store=_store(environ.get("TRAINKIT_STORE", "")),
            prefix=environ.get("TRAINKIT_PREFIX", ""),
            attempt=_number(environ, "TRAINKIT_ATTEMPT"),
            life=_number(environ, "TRAINKIT_LIFE"),
            host=environ.get("TRAINKIT_HOST", "127.0.0.1"),
            token=environ.get("TRAINKIT_TOKEN", ""),
        )


def _number(environ: Mapping[str, str], name: str, default: int = 0) -> int:
    text = environ.get(name, str(default))
    if not text.isdecimal():
        raise _refused(name, text, "must be a whole number, 0 or more.")
    return int(text)


def _store(text: str) -> tuple[str, int] | None:
    host, _, port = text.rpartition(":")
    if text and not (host and port.isdecimal()):
        raise _refused("TRAINKIT_STORE", text, "must be HOST:PORT, as in 127.0.0.1:29400.")
    return (host, int(port)) if text else None


def _refused(name: str, value: object, rule: str) -> ConfigError:
    return ConfigError([Problem(key=name, value=value, rule=rule, origin="environment")])
