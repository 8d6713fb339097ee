"""The file that a run leaves at its end, for programs without trainkit.

A shard that is written in place of the whole tensor, or a file of others that an export overwrites, is caught here.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch.nn import functional

import trainkit
from tests.contract.running import run
from tests.support.results import result_of
from tests.support.zoo import Points
from tests.trained import plain
from trainkit import cli
from trainkit.errors import CheckpointError, ConfigError
from trainkit.trained import formats
from trainkit.trained.formats import TrainedModel
from trainkit.trained.model import FileWeights
from trainkit.trainer.checkpoint.tensors import load, newest_valid
from trainkit.verbs.running.train import exit_code

TARGET = "model={_target_: tests.trained.plain.%s}"
PLAIN = (TARGET % "Plain", "data=points", "optimizer.lr=0.05", "batch.global_size=16", "batch.micro_size=8", "steps=6")
PLACES = {
    "fsdp": ("strategy=fsdp", "strategy.replicas=2"),
    "pipeline": ("strategy=pipeline", "strategy.stages=2", "strategy.replicas=1"),
    "parameter_server": ("strategy=parameter_server", "strategy.workers=2", "strategy.servers=2"),
    "tensor_parallel": (
        "strategy=tensor_parallel", "strategy.degree=2", "strategy.replicas=1",
        "strategy.plan={0:colwise,2:rowwise}", TARGET % "Unnormed",
    ),
}  # fmt: skip
"""Strategies that hold the model in parts -> how each runs here."""
CASES = ["one_device", *(pytest.param(name, marks=pytest.mark.long) for name in PLACES)]


@pytest.mark.parametrize("strategy", CASES)
@pytest.mark.slow
def test_a_model_of_any_strategy_computes_the_same_bits_in_a_program_without_trainkit(
    strategy: str, tmp_path: Path
) -> None:
    result = run(tmp_path / "run", *PLAIN, *PLACES.get(strategy, ()))
    split = Points(split="val")
    inputs, targets = split.inputs.double(), split.targets
    torch.save(inputs, tmp_path / "inputs")
    files = [str(tmp_path / "run/model/model.safetensors"), str(tmp_path / "inputs"), str(tmp_path / "outputs")]
    name = "Unnormed" if strategy == "tensor_parallel" else "Plain"
    subprocess.run([sys.executable, "-I", str(plain.__file__), name, *files], check=True, cwd=tmp_path)
    outputs = torch.load(tmp_path / "outputs")
    with torch.no_grad():
        expected = trainkit.load(tmp_path / "run")(inputs)
    assert torch.equal(outputs, expected)
    # the mean over the split, in another order of summation
    assert functional.cross_entropy(outputs, targets).item() == pytest.approx(result["metrics"]["val/loss"], rel=1e-12)


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run whose best weights are those of the worst loss, at its begin."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    return folder, run(folder, *PLAIN, "eval.every_steps=2", "eval.metric=val/loss", "eval.mode=max")


def test_tied_tensors_stand_in_the_file_under_each_of_their_names(tmp_path: Path) -> None:
    run(tmp_path / "run", "model=attention", "data=sentences", "objective=language_modelling", "steps=2")
    state = load_file(tmp_path / "run/model/model.safetensors")
    model = trainkit.load(tmp_path / "run")
    assert torch.equal(state["head.weight"], state["embed.weight"])
    assert model.load_state_dict(state, strict=True).missing_keys == []
    assert {name: tensor.dtype for name, tensor in state.items()} == dict.fromkeys(model.state_dict(), torch.float64)


@pytest.mark.slow
def test_the_best_weights_stand_beside_the_last_where_they_are_others(plain_run: tuple[Path, dict[str, Any]]) -> None:
    folder, result = plain_run
    assert Path(result["best"]) != Path(result["last"])
    best = load(Path(result["best"])).tensors["param/0.weight"]
    assert torch.equal(load_file(folder / "model/best/model.safetensors")["0.weight"], best)
    for model in (
        trainkit.load(folder / "model", checkpoint="best"),
        trainkit.load(folder / "model/best/model.safetensors"),
        trainkit.load(result["best"]),
    ):
        assert torch.equal(model.state_dict()["0.weight"], best)


def test_the_folder_says_which_training_the_model_is_of(plain_run: tuple[Path, dict[str, Any]]) -> None:
    folder, result = plain_run
    assert result["model"] == str(folder / "model")
    config = yaml.safe_load((folder / "model/config.yaml").read_text())
    assert config["model"] == {"_target_": "tests.trained.plain.Plain"}
    assert (config["step"], config["fingerprint"]) == (6, result["fingerprint"])
    card = (folder / "model/README.md").read_text()
    row = f"| val/loss | {result['metrics']['val/loss']:.6g} |"
    assert all(part in card for part in (result["fingerprint"], "tests.support.zoo.Points", row))
    assert "command" not in card  # this program is none that a stranger could run


def test_the_model_is_never_whole_while_it_is_written(
    plain_run: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "meta_model", lambda _: plain.Plain())
    monkeypatch.setattr(formats, "model_with", lambda *_: pytest.fail("the whole model"))
    weights, cfg = load(Path(plain_run[1]["last"])), trainkit.compose(["recipe=null"]).cfg
    trained = TrainedModel(cfg=cfg, weights=weights, which="last")
    record = formats.write_weights(trained, tmp_path).files["model.safetensors"]
    assert record.num_bytes == (tmp_path / "model.safetensors").stat().st_size


@pytest.mark.slow
def test_a_state_dict_of_a_hook_is_written_as_it_is_and_extra_state_is_not_exported(tmp_path: Path) -> None:
    run(tmp_path / "run", *PLAIN, TARGET % "Renamed")
    assert "own.0.weight" in load_file(tmp_path / "run/model/model.safetensors")
    result = run(tmp_path / "other", *PLAIN, TARGET % "Remembering")
    assert (result["status"], result["model"], exit_code(result)) == ("finished", None, 0)
    assert "_extra_state of its state_dict is extra state" in result["model_note"]


@pytest.mark.usefixtures("in_this_process")
def test_a_disk_that_is_full_at_the_export_costs_the_finished_run_nothing_but_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(formats, "write_stream", full)
        result = run(tmp_path / "run", *PLAIN)
    assert (result["status"], result["model"], exit_code(result)) == ("finished", None, 4)
    assert f"{tmp_path}/run/model cannot be written: No space left on device" in capsys.readouterr().err
    assert newest_valid(tmp_path / "run/checkpoints", pytest.fail) is not None
    assert not list((tmp_path / "run").glob(".model*"))
    assert cli.main(["export", str(tmp_path / "run")]) == 0
    written = result_of(tmp_path / "run")
    assert (written["model"], written["metrics"]) == (str(tmp_path / "run/model"), result["metrics"])
    assert "model_error" not in written


@pytest.mark.usefixtures("in_this_process")
def test_an_export_replaces_what_the_run_has_written_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run/model").mkdir(parents=True)
    (tmp_path / "run/model/net.py").write_text("mine")
    run(tmp_path / "run", *PLAIN)
    assert [path.name for path in (tmp_path / "run/model").iterdir()] == ["net.py"]
    (tmp_path / "run/model-2/notes").write_text("mine too")
    assert cli.main(["export", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run/model-2.aside/notes").read_text() == "mine too"
    assert "that this run did not write" in capsys.readouterr().err
    names = ["README.md", "config.yaml", "model.safetensors"]
    assert sorted(path.name for path in (tmp_path / "run/model-2").glob("[!.]*")) == names


@pytest.mark.slow
def test_a_training_starts_from_an_exported_file_as_from_the_checkpoint(
    plain_run: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, first = plain_run
    hashes = {
        run(tmp_path / str(number), *PLAIN, f"init_from={start}", "seed=9")["weights_sha256"]
        for number, start in enumerate([first["last"], folder / "model/model.safetensors", folder / "model"])
    }
    assert len(hashes) == 1
    assert hashes != {first["weights_sha256"]}


@pytest.mark.slow
def test_a_file_that_is_not_of_the_model_starts_no_training(tmp_path: Path) -> None:
    state = plain.Plain().state_dict()
    save_file(state | {"0.bais": state.pop("0.bias")}, tmp_path / "other.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "other.safetensors").read_bytes()[:-1])
    (tmp_path / "text").write_text("these are no tensors, however long the text may be")
    (tmp_path / "pickle").write_bytes(b"\x80\x02}q\x00.")
    (tmp_path / "pointer").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    cases: list[tuple[str, type[Exception], str]] = [
        ("other.safetensors", CheckpointError, r"param/0\.bias is missing there; param/0\.bais is not in this model"),
        ("cut.safetensors", CheckpointError, "is not a complete safetensors file"),
        ("text", ConfigError, "is no safetensors file: it begins with b'these ar'"),
        ("pickle", ConfigError, "pickle: is a pickle"),
        ("pointer", ConfigError, "pointer of Git LFS"),
        ("", ConfigError, "holds neither a checkpoint nor"),
    ]
    for name, error, text in cases:
        with pytest.raises(error, match=text):
            run(tmp_path / "run", *PLAIN, f"init_from={tmp_path / name}")


def test_a_pickle_is_named_with_the_command_that_converts_it(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = plain.Plain().state_dict()
    torch.save({"state_dict": state}, "it's.pt")
    assert cli.main(["recipe=null", 'init_from="it\'s.pt"']) == 2
    errors = capsys.readouterr().err
    assert "init_from=it's.pt: is a zip archive, as torch.save writes pickles" in errors
    command = shlex.split(errors.partition("Convert it: python ")[2].rpartition(" (command line)")[0])
    assert command[0] == "-c"
    exec(command[1], {})
    assert load_file("it's.pt.safetensors").keys() == state.keys()


def test_a_file_with_two_values_for_a_tied_tensor_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    save_file({"0.weight": torch.ones(2, 2), "1.weight": torch.ones(2, 2)}, tmp_path / "same.safetensors")
    assert torch.equal(FileWeights.of(tmp_path / "same.safetensors", model)["param/0.weight"], torch.ones(2, 2))
    save_file({"0.weight": torch.ones(2, 2), "1.weight": torch.zeros(2, 2)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"holds other values for 0\.weight than for 1\.weight"):
        FileWeights.of(tmp_path / "other.safetensors", model)


def test_a_changed_file_is_not_loaded(plain_run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    file = shutil.copytree(plain_run[0] / "model", tmp_path / "model") / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"model\.safetensors has changed since it was written"):
        trainkit.load(tmp_path / "model")


def test_a_run_that_shall_not_be_exported_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "run", *PLAIN, "checkpoint.export=false")["model"] is None
    assert not (tmp_path / "run/model").exists()
    for path, text, flags in (
        ("none", "is not a run folder", []),
        ("run", "--to safetensor: ", ["--to", "safetensor"]),
    ):
        assert cli.main(["export", str(tmp_path / path), *flags]) == 2
        assert text in capsys.readouterr().err
