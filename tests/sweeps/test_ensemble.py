from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn

import trainkit
from tests.support.second_device import META, SecondDevice
from trainkit.config.schema import MonitoredMetric
from trainkit.errors import CheckpointError, ConfigError
from trainkit.models.ensemble import Ensemble
from trainkit.numerics.precision import Precision
from trainkit.sweeps.results.job_results import read_entry
from trainkit.sweeps.results.leaderboard import Leaderboard
from trainkit.verbs.support.call import Call
from trainkit.verbs.using import ensemble as verb

RUN = ("recipe=null", "epochs=1", "model.batch_norm=true", "callbacks=[]", "logger=[]", "quiet=true")
LOSS = MonitoredMetric(metric="val/loss", mode="min")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs on digits that differ in their seed, and one of a wider model."""
    root = tmp_path_factory.mktemp("sweep")
    for name, more in [("0", "seed=1"), ("1", "seed=2"), ("2", "model.hidden=[32]")]:
        trainkit.train(trainkit.compose([*RUN, "eval.metric=val/accuracy", more]), run_dir=root / name)
    return root


def called(folder: Path, **flags: str) -> int:
    return verb.run(Call(verb="ensemble", arguments=(str(folder),), flags=flags))


def refused(folder: Path, **flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        called(folder, **flags)
    (problem,) = caught.value.problems
    return f"{problem.key}: {problem.rule}"


def figures(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((folder / "model.yaml").read_text())["figures"]
    return found


def two(sweep: Path, root: Path) -> Path:
    for name in ("0", "1"):
        shutil.copytree(sweep / name, root / name)
    return root


def test_members_are_scored_as_they_were_in_training_and_the_ensemble_beside_them(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    switched: list[tuple[str, str]] = []
    monkeypatch.setattr(Precision, "apply_globally", lambda self, kind: switched.append((self.value, kind)))
    assert called(two(sweep, tmp_path), k="2") == 0
    told = figures(tmp_path / "ensemble")
    assert list(told)[2:] == ["ensemble of 2", "averaged weights"]
    assert switched == [("fp32", "cpu")]
    for name in ("0", "1"):
        result = json.loads((tmp_path / name / "result.json").read_text())["metrics"]
        # sums of 360 samples in batches of other sizes: a few units in the last place of float32
        assert told[f"job {name}"]["val/loss"] == pytest.approx(result["val/loss"], rel=1e-6)
        assert told[f"job {name}"]["val/accuracy"] == result["val/accuracy"]
    assert told["ensemble of 2"]["val/loss"] < max(told[f"job {name}"]["val/loss"] for name in "01")
    assert "| ensemble of 2 |" in (tmp_path / "ensemble/ensemble.md").read_text()
    assert f'trainkit.load("{tmp_path}/ensemble")' in capsys.readouterr().out


def test_the_written_model_is_loaded_as_one_and_gives_the_mean_of_probabilities(sweep: Path, tmp_path: Path) -> None:
    called(two(sweep, tmp_path), k="2")
    images = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    joined = trainkit.load(tmp_path / "ensemble")
    members = [trainkit.load(tmp_path / name)(images).softmax(-1) for name in ("0", "1")]
    torch.testing.assert_close(joined(images).exp(), sum(members) / 2)
    assert not joined.training


def test_averaged_weights_are_the_mean_and_their_batch_statistics_are_counted_anew(sweep: Path, tmp_path: Path) -> None:
    called(two(sweep, tmp_path), k="2")
    averaged = trainkit.load(tmp_path / "ensemble/averaged").state_dict()
    members = [trainkit.load(tmp_path / name).state_dict() for name in ("0", "1")]
    for name, tensor in averaged.items():
        mean = (members[0][name].double() + members[1][name].double()) / 2
        if "running" in name:
            assert not torch.allclose(tensor.double(), mean, rtol=1e-3)
        elif tensor.is_floating_point():
            torch.testing.assert_close(tensor.double(), mean, rtol=1e-6, atol=1e-7)


def test_models_of_other_shapes_have_no_mean_of_weights(sweep: Path, tmp_path: Path) -> None:
    shutil.copytree(sweep, tmp_path / "all")
    called(tmp_path / "all", out=str(tmp_path / "made"))
    assert "averaged weights" not in figures(tmp_path / "made")
    assert [path.name for path in sorted((tmp_path / "made").iterdir())] == [
        "ensemble.md", "model.safetensors", "model.yaml",
    ]  # fmt: skip


def test_an_earlier_ensemble_is_left_alone(sweep: Path, tmp_path: Path) -> None:
    two(sweep, tmp_path)
    for _ in range(2):
        called(tmp_path, k="2", checkpoint="best")
    assert (tmp_path / "ensemble-2/model.yaml").exists()


def test_damaged_weights_are_not_loaded(sweep: Path, tmp_path: Path) -> None:
    called(two(sweep, tmp_path), k="2")
    file = tmp_path / "ensemble/model.safetensors"
    assert set(load_file(file)) == set(trainkit.load(tmp_path / "ensemble").state_dict())
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors has changed since it was written"):
        trainkit.load(tmp_path / "ensemble")


def test_a_model_of_a_package_that_nobody_allowed_is_not_imported(sweep: Path, tmp_path: Path) -> None:
    called(two(sweep, tmp_path), k="2")
    config = tmp_path / "ensemble/model.yaml"
    config.write_text(config.read_text().replace("trainkit.models.mlp.Mlp", "os.system"))
    with pytest.raises(ConfigError, match=r"model\.members\.0\._target_=os\.system: os is not among the packages"):
        trainkit.load(tmp_path / "ensemble")


def test_what_cannot_be_combined_is_refused(sweep: Path, tmp_path: Path) -> None:
    assert refused(sweep, k="4") == "--k 4: only 3 runs there have val/accuracy."
    assert refused(sweep, k="1") == "--k 1: an ensemble needs at least 2 members."
    assert refused(sweep, checkpoint="first") == "--checkpoint first: must be best or last."
    two(sweep, tmp_path)
    for file, unit in (("resolved.yaml", "scaling: unit"), ("environment.json", '"scaling": "unit"')):
        text = (tmp_path / "1" / file).read_text()
        assert unit in text
        (tmp_path / "1" / file).write_text(text.replace(unit, unit.replace("unit", "standard")))
    assert "Members are scored on the same samples by the same loss" in refused(tmp_path, k="2")


def test_folds_are_no_members(tmp_path: Path) -> None:
    entries = [read_entry(tmp_path, job=job, exit_code=None) for job in ("0-2", "3-5")]
    from dataclasses import replace

    from trainkit.sweeps.results.ensemble import best_of

    board = Leaderboard.of([replace(one, metrics={"val/loss": 1.0}, spread={"val/loss": 0.1}) for one in entries], LOSS)
    with pytest.raises(
        ConfigError, match=r"its runs are folds, each scored on other samples\. Train the wanted points"
    ):
        best_of(board, 2)


def test_load_says_where_there_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no model: it is not a run, not a checkpoint, and not a folder"):
        trainkit.load(tmp_path)


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
