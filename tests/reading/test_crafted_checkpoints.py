"""A checkpoint with right hashes and absurd content that is loaded, or ends the run, is caught here alone.

It is named with the reason, in one line, and the one before it is used.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from tests.support.crafted import forge, forge_header, put, within
from tests.support.saving import save
from trainkit.errors import CheckpointError
from trainkit.run.session.restore import refuse_malformed
from trainkit.trainer.checkpoint.tensors import load_below, newest_valid

META: Final[dict[str, Any]] = {
    "position": {"step": 2, "tickets": []},
    "fingerprint": "f",
    "state": {
        "step": 2, "seconds": 1.0, "best": None, "retries": 0,
        "left_out": {"count": 0, "first": -1, "last": -1, "steps": []},
    },
    "loss_scale": {"scale": 1.0, "good_steps": 0, "overflows": 0},
    "callbacks": {},
    "data": None,
    "strategy": {},
}  # fmt: skip


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 and 2, as a run writes them."""
    root: Path = tmp_path_factory.mktemp("run") / "checkpoints"
    for step in (1, 2):
        meta = {**META, "state": {**META["state"], "step": step}}
        save(root, step=step, tensors={"param/w": torch.ones(4, 2), "param/b": torch.ones(2)}, meta=meta)
    return root


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(pristine, tmp_path / "run" / "checkpoints"))


def refuse(root: Path, reason: str) -> None:
    """Check that step 2 is passed over for a reason, in one line, and step 1 is used."""
    said: list[str] = []
    with within(20):
        loaded = newest_valid(root, said.append, check=refuse_malformed)
    assert loaded is not None
    assert loaded.checkpoint.step == 1
    assert loaded.tensors["param/w"].eq(1).all()
    (line,) = said
    assert reason in line
    assert line.endswith("Using step_00000001 instead.")
    assert len(line) < 1000
    assert line.isprintable()


@pytest.mark.parametrize("file", ["manifest.json", "index.json", "meta.json", "rank_00000.safetensors"])
@pytest.mark.parametrize("kind", ["a pipe", "a link to a copy of itself"])
def test_what_is_no_regular_file_is_not_read(root: Path, kind: str, file: str) -> None:
    put(kind, root / "step_00000002" / file)
    refuse(root, f"{file} cannot be read (it is a ")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("a link to a copy of itself", "it is a symbolic link"), ("a file", "it is a file"), ("nothing", "no manifest")],
)
def test_what_is_no_folder_of_a_checkpoint_is_passed_over(root: Path, kind: str, reason: str) -> None:
    step = root / "step_00000002"
    if kind.startswith("a link"):
        put(kind, step)
    else:
        shutil.rmtree(step)
        step.write_text("") if kind == "a file" else step.mkdir()
    refuse(root, reason)


def without(key: str) -> Callable[[Any], Any]:
    return lambda content: {name: value for name, value in content.items() if name != key}


def weight(**changes: Any) -> Callable[[Any], Any]:
    """Change what an index says of param/w."""
    return lambda content: content["tensors"]["param/w"].update(changes)


DEEP: Final = b'{"a":' * 100_000
PIECE: Final = {"file": "rank_00000.safetensors", "offset": [0, 0], "size": [4, 2]}
CRAFTED: Final[list[tuple[str, Callable[[Any], Any] | bytes, str]]] = [
    ("manifest.json", DEEP, "its JSON is nested deeper than 64"),
    ("manifest.json", b"[1, 2]", "manifest.json has changed since it was written"),
    ("manifest.json", without("step"), "its key step is missing"),
    ("manifest.json", lambda content: content.update(position=json.loads("[" * 99 + "]" * 99)), "nested deeper"),
    ("manifest.json", lambda content: content.update(format=0), "its format is 0"),
    ("manifest.json", lambda content: content.update(step=7), "its manifest.json is that of step 7"),
    ("manifest.json", lambda content: content.update(files={}), "index.json is not listed"),
    ("manifest.json", lambda content: content["files"]["meta.json"].update(bytes=-1), "it has no size and SHA-256 of"),
    ("manifest.json", lambda content: content["files"].update({"../x\u001b": {"bytes": 1, "sha256": ""}}), r"../x\x1b"),
    ("index.json", b"[]", "it is a list, and a map was expected"),
    ("index.json", lambda content: content.update(aliases={"a": "b"}), "does not fit"),
    ("index.json", weight(shape=["4", "2"]), "whole numbers"),
    ("index.json", weight(shape=[2**40, 2**40]), "larger than any tensor"),
    ("index.json", weight(pieces=[{**PIECE, "offset": [1, 0]}]), "a piece reaches beyond it"),
    ("index.json", weight(dtype="F64"), "a piece of param/w is"),
    ("index.json", weight(pieces=[]), "hold 0 of 8 numbers"),
    ("index.json", weight(pieces=[PIECE] * 16_385), "has 16,385 pieces; the limit is 16,384"),
    ("index.json", weight(pieces=[{**PIECE, "file": "../x"}]), "'../x'"),
    ("meta.json", without("state"), "its key state is missing"),
    ("meta.json", lambda content: content["state"].update(step=9), "its step is 9, and that of the manifest 2"),
    ("meta.json", lambda content: content["loss_scale"].update(scale=None), "its key scale is null"),
    ("meta.json", lambda content: content["state"]["left_out"].update(steps=[1]), "of item 1: it is an integer"),
]


@pytest.mark.parametrize(("file", "change", "reason"), CRAFTED, ids=[f"{row[0]}: {row[2]}" for row in CRAFTED])
def test_crafted_json_of_a_checkpoint_is_passed_over(
    root: Path, file: str, change: Callable[[Any], Any] | bytes, reason: str
) -> None:
    forge(root / "step_00000002", file, change)
    refuse(root, reason)


HEADERS: Final[dict[str, Callable[[Any], Any] | bytes]] = {
    "deep": DEEP,
    "shapes of floats": lambda content: content["param/w"].update(shape=[4.0, 2.0]),
    "a huge empty tensor": lambda content: content.update(
        {"e": {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [40, 40]}}
    ),
    "bytes that overlap": lambda content: content["param/w"].update(data_offsets=[0, 32]),
}


@pytest.mark.parametrize("name", HEADERS)
def test_crafted_tensors_of_a_checkpoint_are_passed_over(root: Path, name: str) -> None:
    forge_header(root / "step_00000002", HEADERS[name])
    refuse(root, "rank_00000.safetensors has changed since it was written")


def test_a_folder_of_checkpoints_that_is_a_link_is_refused(root: Path) -> None:
    root.symlink_to(root.rename(root.with_name("elsewhere")))
    with pytest.raises(CheckpointError, match=r"checkpoints cannot be read: it is a symbolic link"):
        newest_valid(root, pytest.fail)
    with pytest.raises(CheckpointError, match="it is a symbolic link"):
        load_below(root, "step_00000002")
