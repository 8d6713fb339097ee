"""`trainkit predict`: rows in another order than the dataset, or a killed prediction that repeats rows, are caught.

Files of predictions: a part that was cut off and counts as whole is caught here alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trainkit
from tests.support import quick
from tests.trained.samples import OwnLoss, Pair, Ragged, Rows
from trainkit.api import jobs
from trainkit.data.sets.images import Digits
from trainkit.errors import CheckpointError, ConfigError, DataError, MissingExtraError
from trainkit.models.mlp import Mlp
from trainkit.numerics.precision import Precision
from trainkit.trained.predict import Chunks, Parts, check_format, ids_of, write_rows
from trainkit.verbs.support.call import Call
from trainkit.verbs.using import predict as verb

RUN = ("recipe=null", "epochs=1", "callbacks=[]", "logger=[]", "quiet=true")
ROWS = ("data._target_=tests.trained.samples.Rows", "data.num_rows=100")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on digits."""
    folder = tmp_path_factory.mktemp("run") / "digits"
    trainkit.train(trainkit.compose(RUN), run_dir=folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on vectors of four numbers."""
    folder = tmp_path_factory.mktemp("run") / "vectors"
    vectors = ("data=synthetic", "data.shape=[4]", "data.num_samples=64", "model.in_features=4")
    trainkit.train(trainkit.compose([*RUN, *vectors]), run_dir=folder)
    return folder


def predict(path: Path, out: str, *overrides: str, **flags: str) -> int:
    flags = {"out": out, **flags}
    call = Call(verb="predict", arguments=(str(path),), flags=flags, overrides=overrides, packages=("tests",))
    return verb.run(call)


def refused(path: Path, out: str, *overrides: str, **flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        predict(path, out, *overrides, **flags)
    return str(caught.value)


def plain(run: Path) -> torch.Tensor:
    """The logits of the validation split, computed by hand in batches of 64."""
    model, images = trainkit.load(run), Digits(split="val").tensors()[0]
    with torch.no_grad():
        return torch.cat([model(images[start : start + 64]) for start in range(0, len(images), 64)])


@pytest.mark.slow
def test_rows_are_those_of_a_plain_loop_in_the_order_of_the_dataset(run: Path, cwd: Path) -> None:
    assert predict(run, "out.npy") == 0
    assert (np.load("out.npy") == plain(run).numpy()).all()
    assert np.load("out.ids.npy").tolist() == list(range(360))
    assert sorted(file.name for file in cwd.iterdir()) == ["out.ids.npy", "out.npy"]


def test_probabilities_classes_and_an_embedding_are_those_of_a_plain_loop(run: Path, cwd: Path) -> None:
    predict(run, "p.npy", "predict.outputs=probabilities")
    predict(run, "c.jsonl", "predict.outputs=classes")
    predict(run, "e.npy", "predict.outputs=embedding:layers.0")
    assert (np.load("p.npy") == plain(run).softmax(dim=-1).numpy()).all()
    classes = [json.loads(line)["classes"] for line in Path("c.jsonl").read_text().splitlines()]
    assert classes == plain(run).argmax(dim=-1).tolist()
    model, images = trainkit.load(run), Digits(split="val").tensors()[0]
    with torch.no_grad():
        expected = model.get_submodule("layers.0")(images[:64].flatten(1))
    assert (np.load("e.npy")[:64] == expected.numpy()).all()


@pytest.mark.slow
def test_an_output_is_taken_by_its_name_with_an_objective_of_ones_own(cwd: Path) -> None:
    run = trainkit.train(RUN, run_dir="own", model=Pair, objective=OwnLoss).folder
    assert predict(run, "boxes.jsonl", "predict.outputs=output:boxes") == 0
    outputs = [json.loads(line)["output"] for line in Path("boxes.jsonl").read_text().splitlines()]
    images, model = Digits(split="val").tensors()[0], trainkit.load(run, packages=["tests"])
    with torch.no_grad():
        assert outputs[:64] == model(images[:64])["boxes"].tolist()
    assert torch.equal(
        trainkit.predict(run, Digits(split="val"), outputs="output:boxes", packages=["tests"])[:64],
        torch.tensor(outputs[:64]),
    )
    assert "They are boxes, scores." in refused(run, "out.npy", "predict.outputs=output:box")


def test_samples_need_no_targets_and_the_only_split_is_taken(rows: Path, cwd: Path) -> None:
    assert predict(rows, "out.npy", *ROWS) == 0
    assert np.load("out.npy").shape == (100, 10)


def interrupted(path: Path, out: str, *overrides: str, step: int, rank: int = 0) -> int:
    """Start a prediction that is killed after so many batches of a rank."""
    arguments = ["predict", str(path), "--out", out, "--allow-package=tests", *overrides]
    planted = {**os.environ, "TRAINKIT_FAIL": f"rank={rank},step={step},phase=evaluate,action=kill"}
    planted["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run(quick.command(*arguments), env=planted, capture_output=True, check=False)
    for lock in Path(f"{out}.parts").glob(".lock"):  # the command ends a moment before the fork that it stands for
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
    return done.returncode


def test_a_prediction_that_was_killed_continues_to_the_same_bytes(
    rows: Path, cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = (*ROWS, "predict.batch_size=2")
    predict(rows, "whole.npy", *small)
    assert interrupted(rows, "out.npy", *small, step=40) != 0
    done = [path.name for path in sorted(Path("out.npy.parts").glob("part_*"))]
    assert done == ["part_00000000.npy", "part_00000001.npy"]
    assert not Path("out.npy").exists()
    problem = refused(rows, "out.npy", *ROWS, "predict.batch_size=3")
    assert "holds the parts of another prediction, which differs in batch_size, 2 there and 3 here" in problem
    shutil.copytree("out.npy.parts", "other.npy.parts")
    assert predict(rows, "other.npy", *ROWS, "predict.batch_size=3", overwrite="") == 0
    assert predict(rows, "out.npy", *small) == 0
    assert "continues after 64 of 100 rows" in capsys.readouterr().err
    assert Path("out.npy").read_bytes() == Path("whole.npy").read_bytes()
    assert not Path("out.npy.parts").exists()


def test_what_stands_in_the_place_of_the_file_is_refused_and_kept(run: Path, cwd: Path) -> None:
    Path("out.ids.npy").write_text("mine")
    assert "--out=out.ids.npy: exists already" in refused(run, "out.npy")
    assert Path("out.ids.npy").read_text() == "mine"
    assert predict(run, "out.npy", overwrite="") == 0
    Path("rows.npy").mkdir()
    assert "is a folder. Give another name." in refused(run, "rows.npy", overwrite="")
    Path("more.npy.parts").mkdir()
    assert "exists and was not written by a prediction" in refused(run, "more.npy")


def test_a_prediction_that_fails_before_its_first_part_leaves_nothing_and_one_of_nan_says_so(
    run: Path, cwd: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "run_job", lambda *_, **__: pytest.fail("damaged"))
    with pytest.raises(pytest.fail.Exception):
        predict(run, "rows.npy")
    assert [*Path().iterdir()] == []
    monkeypatch.undo()
    monkeypatch.chdir(cwd)
    monkeypatch.setattr(Mlp, "forward", lambda _self, inputs: torch.full((len(inputs), 10), torch.nan))
    assert predict(run, "rows.npy") == 0
    assert "note: 360 of 360 rows contain NaN or infinity." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "flags", "message"),
    [
        (["predict.outputs=embedding:head"], {}, "It has layers, layers.0"),
        (["predict.outputs=scores"], {}, "predict.outputs=scores: must be logits"),
        (["objective=regression", "predict.outputs=classes"], {}, "Regression are not scores of classes"),
        (["optimizer.lr=1"], {}, "optimizer.lr: has no effect on predict"),
        (["model=mlp"], {}, "model: has no effect on predict"),
        ([], {"split": "test"}, "--split=test: the data has the splits train, val"),
    ],
)
def test_what_does_not_fit_is_refused(
    run: Path, cwd: Path, overrides: Sequence[str], flags: dict[str, str], message: str
) -> None:
    assert message in refused(run, "out.npy", *overrides, **flags)
    assert not list(cwd.iterdir())


def test_folders_that_hold_no_model_are_refused_with_their_exit_code(run: Path, cwd: Path) -> None:
    assert "nowhere: there is no such file or folder" in refused(Path("nowhere"), "out.npy")
    Path("empty").mkdir()
    assert "holds no model: it is neither a run" in refused(Path("empty"), "out.npy")
    Path("half").mkdir()
    Path("half/resolved.yaml").write_text((run / "resolved.yaml").read_text())
    with pytest.raises(CheckpointError, match=r"half has no checkpoint named last") as caught:
        predict(Path("half"), "out.npy")
    assert caught.value.exit_code == 4
    Path("half/resolved.yaml").write_text((run / "resolved.yaml").read_text().replace("- 128", "- 96"))
    Path("half/checkpoints").symlink_to(run / "checkpoints")
    with pytest.raises(CheckpointError):
        predict(Path("half"), "out.npy")
    assert not Path("out.npy").exists()


def test_python_predicts_with_a_model_or_a_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, used, set_for = Digits(split="val"), list[torch.device](), list[str]()
    monkeypatch.setattr("trainkit.trained.predict.use_device", used.append)
    monkeypatch.setattr(Precision, "apply_globally", lambda _, kind: set_for.append(kind))
    assert torch.equal(trainkit.predict(run, images), plain(run))
    assert used == [torch.device("cpu")]
    model = nn.Linear(4, 3).train()
    data = Rows(num_rows=10)
    expected = model(data.gather(torch.arange(10))).detach()
    assert torch.equal(trainkit.predict(model, data, batch_size=10), expected)
    assert set_for == ["cpu"]  # for the run alone: a model keeps the settings of its program
    assert model.training


def test_samples_whose_outputs_differ_in_shape_are_refused() -> None:
    model = nn.Linear(4, 3)
    with pytest.raises(DataError, match="the outputs of a sample have the shape"):
        trainkit.predict(model, Ragged(num_rows=8), batch_size=4)


CHUNKS = Chunks(num_rows=100, batch_size=3)
VALUES = np.arange(200, dtype=np.float32).reshape(100, 2) / 3


def complete(folder: Path, values: Any = VALUES) -> Parts:
    parts = Parts(folder=folder, chunks=CHUNKS)
    for chunk in range(CHUNKS.count):
        parts.write(chunk, (values[start : start + CHUNKS.batch_size] for start in CHUNKS.batches_of(chunk)))
    return parts


def numbers() -> Iterator[int]:
    return iter(range(100))


def names() -> Iterator[str]:
    return (f"é{index}" for index in range(100))


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    (tmp_path / "parts").mkdir()
    return complete(tmp_path / "parts")


def test_npy_holds_the_rows_and_ids_beside_them(tmp_path: Path, parts: Parts) -> None:
    write_rows(tmp_path / "out.npy", parts, names, name="logits")
    assert (np.load(tmp_path / "out.npy") == VALUES).all()
    assert np.load(tmp_path / "out.ids.npy").tolist() == list(names())


def test_jsonl_holds_a_row_a_line_and_null_where_json_has_no_number(tmp_path: Path, parts: Parts) -> None:
    values = VALUES.copy()
    values[7, 1] = np.nan
    write_rows(tmp_path / "out.jsonl", complete(parts.folder, values), numbers, name="logits")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == list(range(100))
    assert rows[7]["logits"] == [float(VALUES[7, 0]), None]


def test_parquet_holds_ids_and_lists_of_one_length(tmp_path: Path, parts: Parts) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    write_rows(tmp_path / "out.parquet", parts, names, name="logits")
    table = parquet.read_table(tmp_path / "out.parquet")
    assert table.column("id").to_pylist() == list(names())
    assert np.array_equal(np.array(table.column("logits").to_pylist(), dtype=np.float32), VALUES)


def test_a_part_that_was_cut_off_counts_as_absent(parts: Parts) -> None:
    with parts.file(1).open("r+b") as file:
        file.truncate(parts.file(1).stat().st_size - 1)
    assert parts.done() == [0, 2]


def test_a_part_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    parts = Parts(folder=tmp_path, chunks=CHUNKS)

    def interrupted_batches() -> Iterator[Any]:
        yield VALUES[:3]
        raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        parts.write(0, interrupted_batches())
    assert list(tmp_path.iterdir()) == []


def test_rows_of_several_shapes_are_refused_by_their_place(tmp_path: Path, parts: Parts) -> None:
    parts.write(1, [np.zeros((48, 5), dtype=np.float32)])
    with pytest.raises(DataError, match=r"\(2,\) at the beginning, and \(5,\) from sample 48 on. Pad the samples"):
        write_rows(tmp_path / "out.npy", parts, numbers, name="logits")
    assert not (tmp_path / "out.npy").exists()


def test_other_endings_and_an_absent_package_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--out=out.csv: must end in"):
        check_format(Path("out.csv"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match='pip install "pyarrow>='):
        check_format(Path("out.parquet"))


def test_a_dataset_may_name_its_rows() -> None:
    class Files(list[int]):
        ids = ("a", "b")

    assert list(ids_of(Files([1, 2]))) == ["a", "b"]
