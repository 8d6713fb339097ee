"""A line of the user's code that makes every step of a GPU wait, and that nobody hears of, is caught here alone."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.support.results import result_of
from trainkit.cli import main
from trainkit.run.session import syncs

RUN = (
    "--allow-package", "tests", "recipe=digits", "steps=9", "log_every_steps=1", "callbacks=[]", "logger=[]",
    "quiet=true", "checkpoint.export=false", "batch.micro_size=32",
    "model={_target_: tests.run.test_watched_waits.Reads, in_features: 64, out_features: 10}",
)  # fmt: skip
TEXT = "called a synchronizing CUDA operation (Triggered internally at /pytorch/c10/cuda/CUDAFunctions.cpp:149.)"
WAIT = compile(f"import warnings; warnings.warn({TEXT!r})", f"{Path(torch.__file__).parent}/_tensor.py", "exec")
"""What torch does in the frame that calls an operation which waits, here a frame of torch."""
modes: list[str] = []


class Reads(nn.Linear):
    """A layer that reads a number of its activations."""

    def forward(self, inputs: Tensor) -> Tensor:
        if "warn" in modes[-1:]:
            exec(WAIT)  # as .item() would
        warnings.warn("mine", stacklevel=1)
        return super().forward(inputs.flatten(1))


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    modes.clear()
    yield modes
    modes.clear()


def notes_of(folder: Path) -> list[str]:
    with pytest.warns(UserWarning, match="mine"):
        assert main([*RUN, f"hydra.run.dir={folder}"]) == 0
    return [str(note) for note in result_of(folder).get("notes", [])]


@pytest.mark.slow
def test_the_line_of_a_model_that_waits_is_named_once_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(syncs, "_WATCHED", "cpu")
    shown = warnings.showwarning
    (named,) = (note for note in notes_of(tmp_path / "run") if "each step wait" in note)
    line = 1 + Path(__file__).read_text().split("exec(WAIT)  # as")[0].count("\n")
    assert named.startswith(
        f"{__file__}:{line}, in forward: this line makes each step wait for cpu, 2 times: exec(WAIT)"
    )
    assert capsys.readouterr().out.count(named) == 1
    assert modes == ["warn", "default"]
    assert warnings.showwarning is shown


@pytest.mark.slow
def test_a_run_on_a_processor_watches_nothing(tmp_path: Path) -> None:
    assert not any("each step wait" in note for note in notes_of(tmp_path / "run"))
    assert modes == []


def test_a_wait_that_trainkit_itself_causes_has_no_line() -> None:
    code = compile("found = own_line(sys._getframe())", syncs.__file__, "exec")
    exec(code, names := {"own_line": syncs._own_line, "sys": sys})
    assert names["found"] is None
