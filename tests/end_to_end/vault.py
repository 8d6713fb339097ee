"""A user's own logger that holds secrets in every kind of field, and looks for them in the process list."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from trainkit.fields import cosmetic, secret
from trainkit.trainer.events import Callback, Run


@dataclass(frozen=True, kw_only=True)
class Door:
    """A part of a logger with a mark of its own."""

    code: Annotated[str, secret] = ""


@dataclass(frozen=True, kw_only=True)
class Vault(Callback):
    """Writes to `seen` what its processes' command lines show of its secret, and which secret it was given."""

    api_key: str = ""
    project: str = ""
    headers: dict[str, Any] = field(default_factory=dict)
    tokens: list[Any] = field(default_factory=list)
    mark: Annotated[str, cosmetic, secret] = ""
    door: Door = Door()
    size: int = 1
    quotes: bool = False

    def run_start(self, run: Run) -> None:
        """Look at the command line of every process."""
        if self.quotes:
            raise ValueError(f"refuses {self.api_key} and {self.mark}")
        secrets = [self.api_key, self.headers["A"], self.tokens[0], self.mark, self.door.code]
        if run.is_owner:
            shown = [file for file in Path("/proc").glob("[0-9]*/cmdline") if self._is_in(file)]
            (run.folder / "seen").write_text(f"{len(shown)} {len(''.join(secrets))}")

    def _is_in(self, file: Path) -> bool:
        try:
            return self.api_key.encode() in file.read_bytes()
        except OSError:  # it has ended
            return False
