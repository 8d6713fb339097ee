"""A user's own data, in whole runs: the same training on every layout, and as it was without the hooks of `data`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.running import run
from trainkit.errors import ConfigError, DataError

FIXED = ("model=net", "batch.global_size=16", "batch.micro_size=5", "optimizer=sgd", "epochs=2")
OWN = "tests.support.own_data"


def own(name: str) -> tuple[str, str]:
    return "data=own", f"data._target_={OWN}.{name}"


@pytest.mark.parametrize("dataset", ["NamedPoints", "ScannedPoints"])
@pytest.mark.parametrize("workers", [0, 2])
def test_fields_of_any_names_train_as_a_pair_does(tmp_path: Path, dataset: str, workers: int) -> None:
    plain = run(tmp_path / "a", *FIXED, "data=points")
    fields = ("objective.input=voxels", "objective.target=diagnosis", f"loader.num_workers={workers}")
    named = run(tmp_path / "b", *FIXED, *own(dataset), *fields)
    assert named["weights_sha256"] == plain["weights_sha256"]
    assert named["metrics"] == plain["metrics"]


def test_fields_that_are_not_known_are_refused_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has the fields voxels, site, diagnosis, and none is known as the input"):
        run(tmp_path / "a", *FIXED, *own("NamedPoints"))
    with pytest.raises(ConfigError, match=r"objective\.target=grade: there is no such field: a sample has voxels, "):
        run(tmp_path / "a", *FIXED, *own("NamedPoints"), "objective.input=voxels", "objective.target=grade")
    assert not (tmp_path / "a").exists()
