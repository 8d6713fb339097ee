"""Call the hooks of callbacks: a failing one is named, and an observer that fails is left out from then on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trainkit.errors import CALLBACK_NOTE, TrainkitError
from trainkit.trainer.events import Callback

_log = logging.getLogger(__name__)


class CallbackHooks:
    """The callbacks of a run, in the order of their calls.

    Args:
        callbacks: all of them.
        observers_end_run: whether an error of an observer ends the run, as that of any other callback does.
    """

    def __init__(self, callbacks: Sequence[Callback], *, observers_end_run: bool = False) -> None:
        self._callbacks, self._observers_end_run = list(callbacks), observers_end_run
        self._left_out: set[int] = set()
        self.running: tuple[Callback, str] | None = None
        """The callback and the hook that run at this moment."""
        self.failures: list[dict[str, str]] = []
        """The observers that were left out: callback, hook, error."""

    def __iter__(self) -> Iterator[Callback]:
        """Yield the callbacks."""
        return iter(self._callbacks)

    def call(self, hook: str, *args: Any, suppressed: tuple[type[Exception], ...] = ()) -> None:
        """Call a hook of every callback; an error of a suppressed class does not keep the others from it."""
        for callback in self._callbacks:
            with contextlib.suppress(*suppressed):
                self._call(callback, hook, args)

    def of(self, hook: str) -> list[Callable[..., None]]:
        """Return a hook of the callbacks that override it, to be called at each step."""
        overriding = [one for one in self._callbacks if getattr(type(one), hook) is not getattr(Callback, hook)]
        return [self._bound(one, hook) for one in overriding]

    def _bound(self, callback: Callback, hook: str) -> Callable[..., None]:
        return lambda *args: self._call(callback, hook, args)

    def _call(self, callback: Callback, hook: str, args: tuple[Any, ...]) -> None:
        if id(callback) in self._left_out:
            return
        before, self.running = self.running, (callback, hook)
        try:
            getattr(callback, hook)(*args)
        except Exception as error:
            # An error of trainkit is one of the run: a full disk, or a config that cannot be.
            if not callback.observes or self._observers_end_run or isinstance(error, TrainkitError):
                error.add_note(f"{CALLBACK_NOTE}{kind_of(callback)}, hook {hook}")
                raise
            self._leave_out(callback, hook, error)
        finally:
            self.running = before

    def _leave_out(self, callback: Callback, hook: str, error: Exception) -> None:
        self._left_out.add(id(callback))
        said = f"{type(error).__name__}: {error}"
        self.failures.append({"callback": kind_of(callback), "hook": hook, "error": said})
        _log.warning("the callback %s failed in %s and is left out from now on: %s", kind_of(callback), hook, said)


def kind_of(callback: Callback) -> str:
    """Return the full name of a callback's class."""
    return f"{type(callback).__module__}.{type(callback).__qualname__}"
