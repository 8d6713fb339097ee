"""A run folder or a checkpoint as an enemy writes it, with hashes that are right.

A verb that waits at a pipe, follows a link or ends in a traceback, a checkpoint with absurd content that is loaded or
ends the run, and state of an optimizer in another shape, past whose end a fused kernel would read, are caught here
alone.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch

import trainkit
from tests.support.crafted import forge, forge_header, put, within
from tests.support.saving import save
from trainkit.cli import main
from trainkit.errors import CheckpointError, TrainkitError
from trainkit.run.session import evaluator_main as evaluator
from trainkit.run.session.restore import refuse_malformed
from trainkit.strategies.core.replica import refuse_mismatch
from trainkit.strategies.tensor_shards import coverage_error
from trainkit.trainer.checkpoint.tensors import header_of, listed, load_below, newest_valid

RUN: Final = ("recipe=null", "callbacks=[]", "logger=[]", "quiet=true", "model.hidden=[8]", "steps=3")
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs with two checkpoints each, which go on to step 3; their sweep; an ensemble of them."""
    root = tmp_path_factory.mktemp("crafted") / "runs"
    for seed in (0, 1):
        cfg = trainkit.compose([*RUN, f"seed={seed}", "stop_at_step=2", "checkpoint.every_steps=1"])
        trainkit.train(cfg, run_dir=root / str(seed))
        (root / str(seed) / ".hydra").mkdir(exist_ok=True)
    rows = [{"job": str(n), "folder": str(n), "overrides": [f"seed={n}"], "exit_code": 0, "tries": 1} for n in (0, 1)]
    (root / "sweep.json").write_text(json.dumps({"command": [], "jobs": rows}))
    assert main(["ensemble", str(root), "--k", "2", "--out", str(root.parent / "ensemble")]) == 0
    return root


@pytest.fixture
def runs(pristine: Path, cwd: Path) -> Path:
    """Copies to damage, in the current folder."""
    shutil.copytree(pristine, cwd / "runs")
    shutil.copytree(pristine.parent / "ensemble", cwd / "ensemble")
    return cwd


def load(folder: str) -> int:
    try:
        trainkit.load(folder)
    except TrainkitError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


VERBS: Final[dict[str, Callable[[], int]]] = {
    "resume": lambda: main(["resume", "runs/0", "quiet=false"]),
    "resume=": lambda: main([*RUN, "seed=0", "resume=runs/0"]),
    "resume=auto": lambda: main([*RUN, "seed=0", "resume=auto", "hydra.run.dir=runs/0"]),
    "top": lambda: main(["top", "runs"]),
    "top --then": lambda: main(["top", "runs", "--k", "1", "--then", "stop_at_step=1"]),
    "diff": lambda: main(["diff", "runs/0", "runs/1"]),
    "ensemble": lambda: main(["ensemble", "runs", "--k", "2"]),
    "evaluator": lambda: evaluator.main(["runs/0"]),
    "load": lambda: load("runs/0"),
    "load ensemble": lambda: load("ensemble"),
}


def end_well(verb: str, capfd: pytest.CaptureFixture[str], *codes: int) -> str:
    """Run a verb; check its exit code and that it prints at most one screen; return what it printed."""
    capfd.readouterr()
    with within(60):
        code = VERBS[verb]()
    out, err = capfd.readouterr()
    assert code in codes, err
    assert "Traceback" not in out + err
    assert len(err.splitlines()) <= 40
    assert max(map(len, err.splitlines()), default=0) < 3000
    return out + err


def write(name: str, content: bytes | str) -> Change:
    return lambda root: (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def pipe(name: str) -> Change:
    return lambda root: put("a pipe", root / name)


def link(name: str) -> Change:
    return lambda root: put("a link to a copy of itself", root / name)


def edited(name: str, change: Callable[[Any], object]) -> Change:
    def edit(root: Path) -> None:
        content = json.loads((root / name).read_text())
        change(content)
        (root / name).write_text(json.dumps(content))

    return edit


def result(**changes: Any) -> Change:
    return edited("runs/0/result.json", lambda content: content.update(changes))


def job(**changes: Any) -> Change:
    return edited("runs/sweep.json", lambda content: content["jobs"][0].update(changes))


def model_text(old: str, new: str) -> Change:
    """Change the text of a folder's model.yaml."""
    return lambda root: write("ensemble/model.yaml", (root / "ensemble/model.yaml").read_text().replace(old, new))(root)


RESOLVED, MANIFEST = "runs/0/resolved.yaml", "runs/0/checkpoints/step_00000002/manifest.json"
SWEEP: Final[list[tuple[str, str, tuple[int, ...]]]] = [
    *((RESOLVED, verb, (2, 4)) for verb in ("resume", "diff", "ensemble", "evaluator", "load")),
    *((MANIFEST, verb, (0,)) for verb in ("resume", "resume=", "resume=auto", "evaluator")),
    ("runs/0/result.json", "top", (0,)),
    ("runs/sweep.json", "top", (4,)),
    ("runs/0/.lock", "resume", (4,)),
    ("runs/0/evaluations.jsonl", "evaluator", (4,)),
    ("runs/0/checkpoints/evaluated.json", "evaluator", (0,)),
    ("runs/0/checkpoints/index.json", "resume", (0,)),
    ("runs/0/.hydra/config.yaml", "top --then", (0, 2, 4)),
    ("ensemble/model.safetensors", "load ensemble", (4,)),
]
"""Every file that a verb reads -> how the verb ends at a pipe in its place, which blocks who opens it."""


@pytest.mark.slow
@pytest.mark.parametrize(("file", "verb", "codes"), SWEEP, ids=[f"{file}: {verb}" for file, verb, _ in SWEEP])
def test_no_verb_waits_for_a_pipe(
    runs: Path, capfd: pytest.CaptureFixture[str], file: str, verb: str, codes: tuple[int, ...]
) -> None:
    pipe(file)(runs)
    end_well(verb, capfd, *codes)


CRAFTED: Final[dict[str, tuple[Change, str, tuple[int, ...]]]] = {
    "a list as config": (write(RESOLVED, "- 1\n- 2\n"), "diff", (2, 4)),
    "a tag that calls": (write(RESOLVED, "name: !!python/object/apply:os.getcwd []\n"), "diff", (2, 4)),
    "lists in place of groups of a model": (write(RESOLVED, "model: [1]\ndata: 5\n"), "load", (2, 4)),
    "a deep result": (write("runs/0/result.json", '{"a":' * 100_000), "load", (0,)),
    "figures that are none": (result(metrics={"val/loss": "x", "val/accuracy": [1], "a": None}), "top", (0,)),
    "a status of a megabyte": (result(status="\033[2J" + "x" * 1_000_000), "top", (0,)),
    "a last checkpoint elsewhere": (result(last="/etc/step_00000009"), "load", (4,)),
    "a list as sweep": (write("runs/sweep.json", "[]"), "top", (4,)),
    "a job at the root": (job(folder="/etc"), "top", (4,)),
    "a link as metrics": (link("runs/0/metrics.jsonl"), "resume", (4,)),
    "metrics that are none": (write("runs/0/metrics.jsonl", b'\xff\n[]\n{"step": "1"}\n'), "resume", (0,)),
    "an endless row of metrics": (write("runs/0/metrics.jsonl", b"x" * (2 << 20)), "resume", (4,)),
    "a lock that is no JSON": (write("runs/0/.lock", "{"), "resume", (2,)),
    "evaluations that are none": (
        write("runs/0/evaluations.jsonl", '[]\n{"step": 1}\n{"step": 2, "checkpoint": "../x", "manifest": ""}\n'),
        "evaluator",
        (0,),
    ),
    "a deep model.yaml": (write("ensemble/model.yaml", "[" * 3000), "load ensemble", (2, 4)),
    "a model.yaml without weights": (model_text("weights:", "others:"), "load ensemble", (2, 4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_file_of_a_run_or_sweep_ends_a_verb_with_one_screen(
    runs: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    change, verb, codes = CRAFTED[name]
    change(runs)
    end_well(verb, capfd, *codes)


LINK: Final = "it is a symbolic link, and trainkit follows none inside its own folders"
DOCUMENTED: Final[list[tuple[str, Change, int, str]]] = [
    ("resume", pipe("runs/0/metrics.jsonl"), 4, "runs/0/metrics.jsonl cannot be read: it is a named pipe."),
    (
        "resume",
        link(MANIFEST),
        0,
        f"step_00000002 is damaged: manifest.json cannot be read ({LINK}). Using step_00000001 instead.",
    ),
    (
        "top",
        job(folder="../0"),
        4,
        "runs/sweep.json cannot be read: its job '0' lies outside the folder of the sweep.",
    ),
    (
        "load",
        lambda root: [change(root) for change in (link("runs/0/checkpoints"), result(last=None))],
        4,
        f"the checkpoints in runs/0/checkpoints cannot be read: {LINK}.",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "change", "code", "text"), DOCUMENTED, ids=["pipe", "link", "outside", "folder"])
def test_the_documented_texts_are_those_of_the_verbs(
    runs: Path, capfd: pytest.CaptureFixture[str], verb: str, change: Change, code: int, text: str
) -> None:
    change(runs)
    assert text in " ".join(end_well(verb, capfd, code).split())


def test_the_target_of_a_linked_lock_is_left_as_it_is(runs: Path) -> None:
    (runs / "precious").write_text("mine")
    (runs / "runs/0/.lock").unlink()
    (runs / "runs/0/.lock").symlink_to(runs / "precious")
    assert main(["resume", "runs/0"]) == 4
    assert (runs / "precious").read_text() == "mine"


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
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 and 2, as a run writes them."""
    root: Path = tmp_path_factory.mktemp("run") / "checkpoints"
    for step in (1, 2):
        meta = {**META, "state": {**META["state"], "step": step}}
        save(root, step=step, tensors={"param/w": torch.ones(4, 2), "param/b": torch.ones(2)}, meta=meta)
    return root


@pytest.fixture
def root(checkpoints: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(checkpoints, tmp_path / "run" / "checkpoints"))


def refuse(root: Path, reason: str) -> None:
    """Check that step 2 is passed over for a reason, in one line, and step 1 is used."""
    lines: list[str] = []
    with within(20):
        loaded = newest_valid(root, lines.append, check=refuse_malformed)
    assert loaded is not None
    assert loaded.checkpoint.step == 1
    assert loaded.tensors["param/w"].eq(1).all()
    (line,) = lines
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
ALTERED: Final[list[tuple[str, Callable[[Any], Any] | bytes, str]]] = [
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


@pytest.mark.parametrize(("file", "change", "reason"), ALTERED, ids=[f"{row[0]}: {row[2]}" for row in ALTERED])
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


@pytest.mark.parametrize(
    ("key", "size"),
    [("optimizer/exp_avg/w", (1,)), ("optimizer/exp_avg_sq@1/w", (8,)), ("optimizer/step/w", (4, 2))],
)
def test_state_of_an_optimizer_in_another_shape_is_refused(key: str, size: tuple[int, ...]) -> None:
    # the fused kernels take the number of elements from the parameter, and read past the end of a shorter state
    tensors = {"param/w": torch.zeros(4, 2), key: torch.zeros(size)}
    with pytest.raises(CheckpointError, match=f"of another model: {key} is "):
        refuse_mismatch({"param/w": (4, 2)}, tensors)


def test_state_of_an_optimizer_of_ones_own_may_have_any_shape() -> None:
    tensors = {"param/w": torch.zeros(4, 2), "optimizer/row_var/w": torch.zeros(4), "optimizer/step/w": torch.zeros(())}
    refuse_mismatch({"param/w": (4, 2)}, tensors)


def test_the_header_of_a_file_of_any_size_is_read() -> None:
    # begin x end of a tensor is no number of elements: it passes 2^63 in files of 3 GB
    names, text = header_of(dict.fromkeys(("a", "b", "c"), (torch.float32, (2**30, 3))))
    starts = {name: entry.start for name, entry in listed(text, 0, 36 << 30).items()}
    assert starts == {name: index * (12 << 30) for index, name in enumerate(names)}


@pytest.mark.parametrize("axis", [0, 1])
def test_thousands_of_pieces_are_compared_in_no_time(axis: int) -> None:
    count = 8000
    shape = [count, 2] if axis == 0 else [2, count]
    cuts = [([index, 0], [1, 2]) if axis == 0 else ([0, index], [2, 1]) for index in range(count)]
    random.Random(0).shuffle(cuts)
    with within(20):  # all pairs took minutes
        assert coverage_error(shape, cuts) is None
        assert coverage_error(shape, [*cuts[:-1], cuts[0]]) == "its pieces overlap"
