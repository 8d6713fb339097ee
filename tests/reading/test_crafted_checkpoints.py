"""A crafted checkpoint is named with the reason, in one line, and the one before it is used."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from tests.support.crafted import KINDS, forge, forge_header, put, within
from trainkit.errors import CheckpointError
from trainkit.run.session.restore import refuse_malformed
from trainkit.trainer.checkpoint import Loaded, load_below, newest_valid, save

META: Final = {
    "position": {"step": 2, "tickets": []},
    "fingerprint": "f",
    "state": {"step": 2, "seconds": 1.0, "best": None, "retries": 0, "left_out": {"count": 0, "steps": []}},
    "loss_scale": {"scale": 1.0, "good_steps": 0, "overflows": 0},
    "callbacks": {},
    "data": None,
    "strategy": {},
}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 and 2, as a run writes them."""
    root: Path = tmp_path_factory.mktemp("run") / "checkpoints"
    for step in (1, 2):
        meta = {**META, "state": {**META["state"], "step": step}}  # type: ignore[dict-item]
        save(root, step=step, tensors={"param/w": torch.ones(4, 2), "param/b": torch.ones(2)}, meta=meta)
    return root


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(pristine, tmp_path / "run" / "checkpoints"))


def newest(root: Path, said: list[str]) -> Loaded | None:
    """Load as a run that begins does, without waiting for anything."""
    with within(20):
        return newest_valid(root, said.append, check=refuse_malformed)


def refuse(root: Path, reason: str) -> None:
    """Check that step 2 is passed over for a reason, in one line, and step 1 is used."""
    said: list[str] = []
    loaded = newest(root, said)
    assert loaded is not None
    assert loaded.checkpoint.step == 1
    assert loaded.tensors["param/w"].eq(1).all()
    (line,) = said
    assert reason in line
    assert line.endswith("Using step_00000001 instead.")
    assert len(line) < 1000
    assert line.isprintable()


@pytest.mark.parametrize("file", ["manifest.json", "index.json", "meta.json", "rank_00000.safetensors"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_regular_file_is_not_read(root: Path, kind: str, file: str) -> None:
    put(kind, root / "step_00000002" / file)
    refuse(root, f"{file} cannot be read ({KINDS[kind]})")


@pytest.mark.parametrize("kind", ["a pipe", "a link to a copy of itself", "a dangling link", "a file", "nothing"])
def test_what_is_no_folder_of_a_checkpoint_is_passed_over(root: Path, kind: str) -> None:
    step = root / "step_00000002"
    if kind == "a link to a copy of itself":
        put(kind, step)
        refuse(root, "is damaged: it is a symbolic link")
        return
    shutil.rmtree(step)
    if kind == "nothing":
        step.mkdir()
    elif kind == "a file":
        step.write_text("")
    else:
        put(kind, step)
    refuse(root, {"nothing": "has no manifest.json", "a file": "it is a file"}.get(kind, "is damaged: it is a"))


Change = Callable[[Any], Any] | bytes
DEEP: Final = b'{"a":' * 100_000
CRAFTED: Final[dict[str, tuple[str, Change, str]]] = {
    "an empty manifest": ("manifest.json", b"", "it is empty"),
    "half a manifest": ("manifest.json", b'{"format": 1, "st', "it is not JSON: Unterminated string"),
    "a manifest in latin-1": ("manifest.json", '{"é": 1}'.encode("latin-1"), "it is not UTF-8 text (byte 3)"),
    "a deep manifest": ("manifest.json", DEEP, "its JSON is nested deeper than 64"),
    "a deep position": (
        "manifest.json",
        lambda content: content.update(position=json.loads("[" * 99 + "]" * 99)),
        "its JSON is nested deeper than 64",
    ),
    "a list as manifest": ("manifest.json", b"[1, 2]", "manifest.json has changed since it was written"),
    "a text as manifest": ("manifest.json", b'"step"', "manifest.json has changed since it was written"),
    "a key twice": ("manifest.json", b'{"step": 1, "step": 2}', "it holds the key 'step' twice"),
    "half a surrogate pair": ("manifest.json", rb'{"fingerprint": "\ud800"}', "half of a surrogate pair"),
    "a million digits": ("manifest.json", b'{"step": %b}' % (b"9" * 1_000_000), "an integer beyond 64 bits"),
    "no step": ("manifest.json", lambda content: content.pop("step") and content, "its key step is missing"),
    "no format": ("manifest.json", lambda content: content.pop("format") and content, "its key format is missing"),
    "format 0": ("manifest.json", lambda content: content.update(format=0), "its format is 0"),
    "format true": ("manifest.json", lambda content: content.update(format=True), "its key format is true or false"),
    "step NaN": ("manifest.json", lambda content: content.update(step=float("nan")), "its key step is NaN"),
    "a negative step": ("manifest.json", lambda content: content.update(step=-2), "and its step -2"),
    "another step": ("manifest.json", lambda content: content.update(step=7), "its manifest.json is that of step 7"),
    "a text as metric": ("manifest.json", lambda content: content.update(metric="0.9"), "its key metric is a text"),
    "a map as fingerprint": ("manifest.json", lambda content: content.update(fingerprint={}), "fingerprint is a map"),
    "a list of files": ("manifest.json", lambda content: content.update(files=[]), "its key files is a list"),
    "no files": ("manifest.json", lambda content: content.update(files={}), "index.json is not listed"),
    "a file without a hash": (
        "manifest.json",
        lambda content: content["files"]["meta.json"].pop("sha256") and content,
        "its key sha256 is missing",
    ),
    "negative bytes": (
        "manifest.json",
        lambda content: content["files"]["meta.json"].update(bytes=-1),
        "it has no size and SHA-256 of",
    ),
    "absurd bytes": (
        "manifest.json",
        lambda content: content["files"]["meta.json"].update(bytes=2**63),
        "bytes instead of 9223372036854775808",
    ),
    "a file outside": (
        "manifest.json",
        lambda content: content["files"].update({"../../x\u001b[2J": content["files"]["meta.json"]}),
        r"names a file outside itself: '../../x\x1b[2J'",
    ),
    "an owner that is a list": ("manifest.json", lambda content: content.update(owner=[]), "(owner)"),
    "a list as index": ("index.json", b"[]", "it is a list, and a map was expected"),
    "a deep index": ("index.json", DEEP, "its JSON is nested deeper than 64"),
    "an index without tensors": ("index.json", b'{"aliases": {}}', "its key tensors is missing"),
    "a list of tensors": ("index.json", lambda content: content.update(tensors=[]), "its key tensors is a list"),
    "a tied name of nothing": ("index.json", lambda content: content.update(aliases={"a": "b"}), "does not fit"),
    "a tied name of a list": ("index.json", lambda content: content.update(aliases={"a": []}), "does not fit"),
    "a shape of texts": (
        "index.json",
        lambda content: content["tensors"]["param/w"].update(shape=["4", "2"]),
        "whole numbers",
    ),
    "a huge shape": (
        "index.json",
        lambda content: content["tensors"]["param/w"].update(shape=[2**40, 2**40]),
        "larger than any tensor",
    ),
    "a negative offset": (
        "index.json",
        lambda content: content["tensors"]["param/w"]["pieces"][0].update(offset=[-1, 0]),
        "whole numbers from 0 on",
    ),
    "an unknown dtype": ("index.json", lambda content: content["tensors"]["param/w"].update(dtype="F7"), "'F7'"),
    "another dtype": (
        "index.json",
        lambda content: content["tensors"]["param/w"].update(dtype="F64"),
        "a piece of param/w is",
    ),
    "no pieces": ("index.json", lambda content: content["tensors"]["param/w"].update(pieces=[]), "hold 0 of 8 numbers"),
    "too many pieces": (
        "index.json",
        lambda content: content["tensors"]["param/w"].update(pieces=content["tensors"]["param/w"]["pieces"] * 20_000),
        "has 20,000 pieces; the limit is 16,384",
    ),
    "a piece of an absent file": (
        "index.json",
        lambda content: content["tensors"]["param/w"]["pieces"][0].update(file="../x"),
        "'../x'",
    ),
    "a list as meta": ("meta.json", b"[]", "it is a list, and a map was expected"),
    "a deep meta": ("meta.json", DEEP, "its JSON is nested deeper than 64"),
    "no state": ("meta.json", lambda content: content.pop("state") and content, "its key state is missing"),
    "a text as step of the state": (
        "meta.json",
        lambda content: content["state"].update(step="2"),
        "its key step is a text",
    ),
    "another step in the state": (
        "meta.json",
        lambda content: content["state"].update(step=9),
        "its step is 9, and that of the manifest 2",
    ),
    "no loss scale": ("meta.json", lambda content: content.pop("loss_scale") and content, "loss_scale is missing"),
    "a list of callbacks": ("meta.json", lambda content: content.update(callbacks=[]), "its key callbacks is a list"),
    "steps left out that are numbers": (
        "meta.json",
        lambda content: content["state"]["left_out"].update(steps=[1]),
        "of item 1: it is an integer",
    ),
    "a text as state of the data": ("meta.json", lambda content: content.update(data="x"), "its key data is a text"),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_json_of_a_checkpoint_is_passed_over(root: Path, name: str) -> None:
    file, change, reason = CRAFTED[name]
    forge(root / "step_00000002", file, change)
    refuse(root, reason)


HEADERS: Final[dict[str, Change]] = {
    "deep": DEEP,
    "a list": b"[]",
    "empty": b"",
    "no UTF-8": b"\xff\xfe",
    "shapes of floats": lambda content: content["param/w"].update(shape=[4.0, 2.0]),
    "a shape of NaN": lambda content: content["param/w"].update(shape=[float("nan")]),
    "a negative shape": lambda content: content["param/w"].update(shape=[-4, -2]),
    "a huge empty tensor": lambda content: content.update(
        {"e": {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [40, 40]}}
    ),
    "a hundred dimensions": lambda content: content["param/w"].update(shape=[4, 2] + [1] * 98),
    "bytes that overlap": lambda content: content["param/w"].update(data_offsets=[0, 32]),
    "an unknown dtype": lambda content: content["param/w"].update(dtype=["F32"]),
    "an offset twice": lambda content: content["param/w"].update(data_offsets=[0, 32, 32]),
}


@pytest.mark.parametrize("name", HEADERS)
def test_crafted_tensors_of_a_checkpoint_are_passed_over(root: Path, name: str) -> None:
    forge_header(root / "step_00000002", HEADERS[name])
    refuse(root, "rank_00000.safetensors has changed since it was written")


def test_a_header_longer_than_its_file_is_passed_over(root: Path) -> None:
    (file,) = (root / "step_00000002").glob("*.safetensors")
    file.write_bytes((2**63).to_bytes(8, "little") + file.read_bytes()[8:])
    refuse(root, "rank_00000.safetensors has changed since it was written")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_manifest_that_may_not_be_read_is_passed_over(root: Path) -> None:
    (root / "step_00000002" / "manifest.json").chmod(0)
    refuse(root, "manifest.json cannot be read (Permission denied)")


def test_a_checkpoint_of_a_later_version_is_not_passed_over(root: Path) -> None:
    forge(root / "step_00000002", "manifest.json", lambda content: content.update(format=2))
    with pytest.raises(CheckpointError, match="has format 2; this version of trainkit reads format 1"):
        newest(root, [])


def test_where_all_are_crafted_all_are_named(root: Path) -> None:
    put("a pipe", root / "step_00000001" / "manifest.json")
    forge(root / "step_00000002", "manifest.json", DEEP)
    with pytest.raises(CheckpointError) as caught:
        newest(root, [])
    assert len(str(caught.value).splitlines()) == 3
    assert caught.value.exit_code == 4


def test_a_folder_of_checkpoints_that_is_a_link_is_refused(root: Path) -> None:
    elsewhere = root.rename(root.with_name("elsewhere"))
    root.symlink_to(elsewhere)
    with pytest.raises(CheckpointError) as caught:
        newest(root, [])
    reason = "it is a symbolic link, and trainkit follows none inside its own folders"
    assert str(caught.value) == f"the checkpoints in {root} cannot be read: {reason}."
    with pytest.raises(CheckpointError, match="it is a symbolic link"):
        load_below(root, "step_00000002")
