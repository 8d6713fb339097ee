"""Define the logger for Weights & Biases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from trainkit.fields import cosmetic
from trainkit.tracking.tracker import Tracker


@dataclass(frozen=True, kw_only=True)
class Wandb(Tracker):
    """Sends a run to Weights & Biases; its server and key are those of `wandb login`, WANDB_BASE_URL, WANDB_API_KEY.

    Offline, the run is written to `RUN/tracking/wandb`, which `wandb sync` uploads.
    """

    tracker: ClassVar[str] = "wandb"

    mode: Annotated[Literal["online", "offline"], cosmetic] = "online"
    """Whether to send during the run, or to write for a later upload."""

    @property
    def connection(self) -> str:
        """`online` or `offline`."""
        return self.mode
