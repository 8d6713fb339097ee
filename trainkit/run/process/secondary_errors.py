"""Distinguish an error that a rank caused itself from one that only reports the loss of another rank.

The text of an error is not enough: a message of user code may mention a peer. The class of the exception and the code
that raised it decide: torch.distributed, or trainkit's own connections between ranks.
"""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from trainkit.errors import PeerError

__all__ = ["is_after_effect"]

_TRANSPORTS: Final = ("torch.distributed", "trainkit.strategies", "trainkit.run", "trainkit.trainer.checkpoint")
"""Packages that exchange data between ranks."""
_TORCH_ERRORS: Final = frozenset(
    {"RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}
)
"""Classes that C++ code of torch.distributed raises; they depend on the version of torch."""
_LOST: Final = re.compile(
    r"gloo/transport/|connection (was )?(likely )?(closed|reset|refused|aborted)|broken pipe|failed to recv"
    r"|timed out|wait timeout|ncclRemoteError|ncclSystemError|remote process exited|communicator was aborted",
    re.IGNORECASE,
)
_OWN: Final = re.compile(
    r"enforce fail|out of memory|cannot allocate memory|no space left|address already in use|EADDRINUSE",
    re.IGNORECASE,
)
"""Errors of this rank that the same libraries raise: mismatched sizes, no memory, a port in use."""
_RAISED: Final = frozenset({"RAISE_VARARGS", "RERAISE"})


def is_after_effect(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, only reports that another rank was lost.

    Example:
        >>> is_after_effect(RuntimeError("Connection reset by peer"))
        False
    """
    place = _Place(modules=(), by_statement=True)
    for one in _chain(error):
        place = _place_of(one) or place  # a cause that was never raised belongs to the error that names it
        if isinstance(one, PeerError) or _is_lost_connection(one, place):
            return True
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """The code that raised an error."""

    modules: tuple[str, ...]
    """The modules of the stack, innermost first."""
    by_statement: bool
    """Whether a `raise` statement of the innermost module raised it; otherwise C code that the module called did."""

    @property
    def in_transport(self) -> bool:
        """Whether a transport raised it, or the standard library called by a transport."""
        ours = (name for name in self.modules if name.partition(".")[0] not in sys.stdlib_module_names)
        return f"{next(ours, '')}.".startswith(tuple(f"{name}." for name in _TRANSPORTS))


def _is_lost_connection(error: BaseException, place: _Place) -> bool:
    if isinstance(error, ConnectionError):  # also trainkit's LinkError
        return place.in_transport
    if type(error).__name__ not in _TORCH_ERRORS or (place.by_statement and not place.in_transport):
        return False
    text = str(error)
    return _LOST.search(text) is not None and _OWN.search(text) is None


def _place_of(error: BaseException) -> _Place | None:
    trace, modules, by_statement = error.__traceback__, [], True
    while trace is not None:
        modules.append(str(trace.tb_frame.f_globals.get("__name__", "")))
        code = trace.tb_frame.f_code.co_code
        by_statement = dis.opname[code[trace.tb_lasti]] in _RAISED
        trace = trace.tb_next
    return _Place(modules=tuple(reversed(modules)), by_statement=by_statement) if modules else None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__
