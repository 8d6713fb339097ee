"""Define the logger for Trackio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trainkit.tracking.tracker import Tracker


@dataclass(frozen=True, kw_only=True)
class Trackio(Tracker):
    """Sends a run to Trackio: to its folder on this machine (`TRACKIO_DIR`), or to the server that its own variables
    name.

    To view it: trackio show
    """

    tracker: ClassVar[str] = "trackio"
