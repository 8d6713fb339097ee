"""`trainkit export RUN` compares the file of weights with the run: a wrong tensor in it is caught here alone."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from tests.contract.running import run
from tests.support.zoo import Points
from tests.trained import plain
from trainkit import cli
from trainkit.trained import formats
from trainkit.trained.checking import NotBuiltError, NotExportableError, run_fresh
from trainkit.trained.formats import refuse_other_outputs
from trainkit.trainer.checkpoint.tensors import write_stream

PLAIN = ("model={_target_: tests.trained.plain.Plain}", "data=points", "steps=2")
TIED = ("model=attention", "data=sentences", "objective=language_modelling", "steps=2")
BY_PROGRAM = "the program of the model that torch.export makes"


def exported(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["export", str(folder)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "built", "count"),
    [(PLAIN, "tests.trained.plain.Plain", 8), pytest.param(TIED, BY_PROGRAM, 7, marks=pytest.mark.long)],
)
@pytest.mark.slow
def test_the_outputs_of_the_file_are_those_of_the_run(
    settings: tuple[str, ...], built: str, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "run", *settings)
    note = (
        f"Checked: each tensor is that of the checkpoint, and in a process without trainkit {built} computes the bits "
        f"of the run for {count} real samples."
    )
    assert note in exported(tmp_path / "run", capsys)
    assert note in (tmp_path / "run/model/README.md").read_text()


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("target", ["tests.trained.plain.Plain", "trainkit.models.Mlp"])  # built, or a program
def test_weights_of_another_model_are_refused_with_the_first_layer_that_differs(target: str, tmp_path: Path) -> None:
    model = plain.Plain().eval()
    wrong = copy.deepcopy(model.state_dict())
    wrong["3.weight"][0, 0] += 0.1
    save_file(wrong, tmp_path / "model.safetensors")
    samples = {"input": Points(split="val").inputs[:8].float()}
    with pytest.raises(NotExportableError, match=r"for 8 real samples its outputs differ.* that differs is 3 \("):
        refuse_other_outputs({"_target_": target}, model, samples, tmp_path)


def test_the_process_that_checks_cannot_import_trainkit(tmp_path: Path) -> None:
    request = {"format": "safetensors", "folder": str(tmp_path), "threads": 1, "path": sys.path, "batches": []}
    request["node"] = {"_target_": "trainkit.models.Mlp"}
    with pytest.raises(NotBuiltError, match="import of trainkit halted"):
        run_fresh(request, "safetensors", tmp_path)


@pytest.mark.long
def test_a_planted_wrong_tensor_ends_the_command_with_exit_code_4_and_the_earlier_export_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "run", *PLAIN)
    before = (tmp_path / "run/model/config.yaml").read_bytes()
    right = write_stream

    def planted(path: Path, kinds: Any, read: Any) -> Any:
        return right(path, kinds, lambda name: read(name) + 1 if name == "1.running_mean" else read(name))

    monkeypatch.setattr(formats, "write_stream", planted)
    assert cli.main(["export", str(tmp_path / "run")]) == 4
    errors = " ".join(capsys.readouterr().err.split())
    assert "the safetensors export is refused: 1.running_mean is torch.float64 (8,) with other numbers" in errors
    assert "The first layer that differs is 1." in errors
    assert (tmp_path / "run/model/config.yaml").read_bytes() == before
    assert not list((tmp_path / "run").glob(".model*"))


@pytest.mark.slow
def test_a_run_without_its_data_or_memory_is_exported_and_the_screen_says_what_was_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], in_this_process: None
) -> None:
    run(tmp_path / "run", *PLAIN)
    with monkeypatch.context() as patch:
        patch.setattr(Points, "__init__", _absent)
        assert "no outputs were compared, as there are no samples: " in exported(tmp_path / "run", capsys)
    monkeypatch.setattr(formats, "available_bytes", lambda: 1000)
    assert "no outputs were compared: 4 models of" in exported(tmp_path / "run", capsys)


def _absent(self: Points, split: str) -> None:
    raise FileNotFoundError(split)
