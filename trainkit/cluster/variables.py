"""Read the environment variables of a launcher, and collect everything that is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trainkit.cluster.address import Address
from trainkit.config.values import whole_number
from trainkit.errors import MISSING, Problem, refuse

_REMEDY: Final = "Correct it, or ignore the launch: TRAINKIT_LAUNCHER=none."


class Variables:
    """Reads the variables of a launcher; problems are collected, and raised together by `finish`.

    A variable with an empty value counts as not set. After a problem a method returns a valid number, so that the other
    variables are read too.

    Example:
        >>> variables = Variables({"RANK": "1", "WORLD_SIZE": "4"}, because="RANK")
        >>> variables.rank_of("RANK", "WORLD_SIZE")
        (1, 4)
    """

    def __init__(self, environ: Mapping[str, str], *, because: str) -> None:
        """Create a reader; the variable `because` shows that this launcher started the process."""
        self._environ = environ
        self._because = because
        self.problems: list[Problem] = []

    def report(self, name: str, rule: str, *, show_value: bool = True) -> None:
        """Add a problem of a variable."""
        value = self._environ.get(name) or MISSING if show_value else MISSING
        self.problems.append(Problem(key=name, value=value, rule=rule, origin="environment"))

    def text(self, name: str) -> str:
        """Return a variable that must be set."""
        value = self._environ.get(name, "")
        if not value:
            hint = "Set it, or ignore the launch: TRAINKIT_LAUNCHER=none."
            self.report(name, f"is not set, though {self._because} is. {hint}")
        return value

    def number(self, name: str, *, default: int | None = None, least: int = 0) -> int:
        """Return an integer that must be set, unless there is a default."""
        if default is not None and not self._environ.get(name):
            return default
        text = self.text(name)
        number = whole_number(text, low=least, high=2**31 - 1)
        if number is not None:
            return number
        if text:
            self.report(name, f"must be a whole number, {least} or more. {_REMEDY}")
        return least

    def rank_of(self, rank_name: str, size_name: str) -> tuple[int, int]:
        """Return a rank and the number of ranks: `RANK` and `WORLD_SIZE`."""
        before = len(self.problems)
        rank, size = self.number(rank_name), self.number(size_name, least=1)
        if len(self.problems) == before and rank >= size:
            self.report(rank_name, f"must be less than {size_name}={size}. {_REMEDY}")
        return rank, size

    def store(
        self,
        host: str | None = None,
        port: int | None = None,
        *,
        names: tuple[str, str] = ("MASTER_ADDR", "MASTER_PORT"),
    ) -> Address:
        """Return the address of the rendezvous: the two variables, or the defaults for this launcher.

        Args:
            host: used if the first variable is not set; None: it must be set.
            port: the same for the second.
            names: the variables.
        """
        host_name, port_name = names
        chosen = self._environ.get(host_name) or (self.text(host_name) if host is None else host)
        number = self.number(port_name, default=port, least=1)
        if number > 65535:
            self.report(port_name, f"must be a port, 65535 at most. {_REMEDY}")
        return Address(chosen.removeprefix("[").removesuffix("]"), number)

    def finish(self) -> None:
        """Raise the problems that were found.

        Raises:
            ConfigError: every problem of these variables.
        """
        refuse(self.problems)
