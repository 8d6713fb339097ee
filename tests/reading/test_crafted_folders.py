"""A verb that hangs at a pipe, follows a link or ends in a traceback at a crafted run folder is caught here alone.

Every verb ends a crafted run or sweep folder with exit code 2 or 4 and one screen.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

import trainkit
from tests.support.crafted import put, within
from trainkit.cli import main
from trainkit.errors import TrainkitError
from trainkit.run.session import evaluator_main as evaluator

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
