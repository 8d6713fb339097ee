"""The formats that a trained model is exported to, and the interface of the module of a format.

A new format is one module in this package and one line in `FORMATS`. `LOADING` is the text of the model card about
loading; the function `write` receives a `TrainedModel` and an empty folder:

    def write(trained: TrainedModel, draft: Path) -> Written:
        (draft / "model.bin").write_bytes(...)
        return Written()

`trainkit.exporting.folder.write_export` adds the description and the model card, and puts the folder in its place only
when `write` has returned: a format that fails its check raises CheckpointError, and its files are removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Final, Protocol, cast

from trainkit.config.grammar import refusal
from trainkit.config.values import nearest
from trainkit.exporting.trained import TrainedModel, Written

FORMATS: Final[Mapping[str, str]] = {
    "safetensors": "trainkit.exporting.whole_file",
    "torch_export": "trainkit.exporting.torch_program",
    "onnx": "trainkit.exporting.onnx_file",
    "huggingface": "trainkit.exporting.hub_folder",
}
"""Format, as given to `--to` -> its module."""


class Format(Protocol):
    """A module of a format."""

    @property
    def LOADING(self) -> str:  # noqa: N802 - a constant of the module
        """Instructions for loading the files, in Markdown."""

    def write(self, trained: TrainedModel, draft: Path) -> Written:
        """Write the model into an empty folder, without folders below it.

        Raises:
            CheckpointError: the weights are damaged, or the model cannot be written in this format; the message
                contains the reason.
            OSError: a file cannot be written.
        """


def format_named(name: str) -> Format:
    """Import the module of a format.

    Raises:
        ConfigError: there is no such format.
    """
    if name not in FORMATS:
        raise refusal(f"--to {name}", f"is not a format. {nearest(name, FORMATS)}")
    return cast("Format", import_module(FORMATS[name]))
