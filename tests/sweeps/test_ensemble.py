"""Ensembles of runs: logits that are averaged in place of probabilities, or stale batch statistics, are caught here."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import trainkit
from tests.support.second_device import META, SecondDevice
from trainkit.config.schema import MonitoredMetric
from trainkit.errors import CheckpointError, ConfigError
from trainkit.models.ensemble import Ensemble
from trainkit.numerics.precision import Precision
from trainkit.sweeps.results.ensemble import best_of
from trainkit.sweeps.results.job_results import read_entry
from trainkit.sweeps.results.leaderboard import Leaderboard
from trainkit.verbs.support.call import Call
from trainkit.verbs.using import ensemble as verb

RUN = ("recipe=null", "epochs=1", "model.batch_norm=true", "callbacks=[]", "logger=[]", "quiet=true")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs on digits that differ in their seed, and one of a wider model."""
    root = tmp_path_factory.mktemp("sweep")
    for name, more in [("0", "seed=1"), ("1", "seed=2"), ("2", "model.hidden=[32]")]:
        trainkit.train(trainkit.compose([*RUN, "eval.metric=val/accuracy", more]), run_dir=root / name)
    return root


@pytest.fixture(scope="module")
def two(sweep: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two of one shape, and their ensemble."""
    root = tmp_path_factory.mktemp("two")
    for name in ("0", "1"):
        shutil.copytree(sweep / name, root / name)
    called(root, k="2")
    return root


def called(folder: Path, **flags: str) -> int:
    return verb.run(Call(verb="ensemble", arguments=(str(folder),), flags=flags))


def figures(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((folder / "model.yaml").read_text())["figures"]
    return found


def test_members_are_scored_as_they_were_in_training_and_the_ensemble_beside_them(
    two: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    switched: list[tuple[str, str]] = []
    monkeypatch.setattr(Precision, "apply_globally", lambda self, kind: switched.append((self.value, kind)))
    assert called(two, k="2", checkpoint="best") == 0
    told = figures(two / "ensemble-2")  # the earlier one is left alone
    assert list(told)[2:] == ["ensemble of 2", "averaged weights"]
    assert switched == [("fp32", "cpu")]
    for name in ("0", "1"):
        result = json.loads((two / name / "result.json").read_text())["metrics"]
        # sums of 360 samples in batches of other sizes: a few units in the last place of float32
        assert told[f"job {name}"]["val/loss"] == pytest.approx(result["val/loss"], rel=1e-6)
        assert told[f"job {name}"]["val/accuracy"] == result["val/accuracy"]
    assert told["ensemble of 2"]["val/loss"] < max(told[f"job {name}"]["val/loss"] for name in "01")
    assert "| ensemble of 2 |" in (two / "ensemble-2/ensemble.md").read_text()
    assert f'trainkit.load("{two}/ensemble-2")' in capsys.readouterr().out


def test_the_written_model_is_loaded_as_one_and_gives_the_mean_of_probabilities(two: Path) -> None:
    images = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    joined = trainkit.load(two / "ensemble")
    members = [trainkit.load(two / name)(images).softmax(-1) for name in ("0", "1")]
    torch.testing.assert_close(joined(images).exp(), sum(members) / 2)
    assert not joined.training


def test_averaged_weights_are_the_mean_and_their_batch_statistics_are_counted_anew(two: Path) -> None:
    averaged = trainkit.load(two / "ensemble/averaged").state_dict()
    members = [trainkit.load(two / name).state_dict() for name in ("0", "1")]
    for name, tensor in averaged.items():
        mean = (members[0][name].double() + members[1][name].double()) / 2
        if "running" in name:
            assert not torch.allclose(tensor.double(), mean, rtol=1e-3)
        elif tensor.is_floating_point():
            torch.testing.assert_close(tensor.double(), mean, rtol=1e-6, atol=1e-7)


def test_models_of_other_shapes_have_no_mean_of_weights(sweep: Path, tmp_path: Path) -> None:
    called(sweep, out=str(tmp_path / "made"))
    assert "averaged weights" not in figures(tmp_path / "made")
    assert not (tmp_path / "made/averaged").exists()


def test_damaged_weights_and_a_class_that_nobody_allowed_are_not_loaded(two: Path, tmp_path: Path) -> None:
    shutil.copytree(two / "ensemble", made := tmp_path / "ensemble")
    file, config = made / "model.safetensors", made / "model.yaml"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"model\.safetensors has changed"):
        trainkit.load(made)
    file.write_bytes(content)
    config.write_text(config.read_text().replace("trainkit.models.Mlp", "os.system"))
    with pytest.raises(ConfigError, match=r"model\.members\.0\._target_=os\.system"):
        trainkit.load(made)
    with pytest.raises(ConfigError, match="holds no model"):
        trainkit.load(tmp_path)


def test_what_cannot_be_combined_is_refused(sweep: Path, two: Path, tmp_path: Path) -> None:
    shutil.copytree(two, other := tmp_path / "other")
    for file, unit in (("resolved.yaml", "scaling: unit"), ("environment.json", '"scaling": "unit"')):
        text = (other / "1" / file).read_text()
        assert unit in text
        (other / "1" / file).write_text(text.replace(unit, unit.replace("unit", "standard")))
    cases: list[tuple[Path, dict[str, str], str]] = [
        (sweep, {"k": "4"}, "--k 4: only 3 runs there have val/accuracy"),
        (sweep, {"k": "1"}, "--k 1: "),
        (sweep, {"checkpoint": "first"}, "--checkpoint first: "),
        (other, {"k": "2"}, "scored on the same samples"),
    ]
    for folder, flags, text in cases:
        with pytest.raises(ConfigError) as caught:
            called(folder, **flags)
        assert text in str(caught.value)


def test_folds_are_no_members(tmp_path: Path) -> None:
    entries = [read_entry(tmp_path, job=job, exit_code=None) for job in ("0-2", "3-5")]
    folds = [replace(one, metrics={"val/loss": 1.0}, spread={"val/loss": 0.1}) for one in entries]
    with pytest.raises(ConfigError, match="its runs are folds"):
        best_of(Leaderboard.of(folds, MonitoredMetric(metric="val/loss", mode="min")), 2)


def test_probabilities_are_averaged_not_scores() -> None:
    sure, unsure = torch.tensor([[20.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    members = [_Constant(sure), _Constant(unsure)]
    expected = (sure.softmax(-1) + unsure.softmax(-1)) / 2
    torch.testing.assert_close(Ensemble(members=members)(None).exp(), expected)
    assert Ensemble(members=members, combine="outputs")(None).tolist() == [[10.0, 0.5]]


def test_scores_of_sixteen_bits_are_averaged_in_thirty_two() -> None:
    narrow = Ensemble(members=[_Constant(torch.zeros(1, 3, dtype=torch.bfloat16))] * 3)(None)
    assert narrow.dtype == torch.float32
    assert narrow[0, 0].item() == pytest.approx(-math.log(3), rel=1e-6)


def test_every_member_computes_on_a_device_of_its_own() -> None:
    with SecondDevice():
        model = Ensemble(members=[nn.Linear(2, 3), nn.Linear(2, 3), nn.Linear(2, 3)])
        model.spread([torch.device("cpu"), META])
        assert [next(member.parameters()).device.type for member in model.members] == ["cpu", "meta", "cpu"]
        assert model(torch.ones(4, 2)).device.type == "cpu"


class _Constant(nn.Module):
    outputs: torch.Tensor

    def __init__(self, outputs: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("outputs", outputs)

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return self.outputs
