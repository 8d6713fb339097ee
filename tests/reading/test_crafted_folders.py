"""Every verb ends a crafted run or sweep folder with exit code 2 or 4 and one screen: no traceback, no hang."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

import trainkit
from tests.support.crafted import KINDS, forge, put, within
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


VERBS: Final[dict[str, Callable[[], int]]] = {
    "resume": lambda: main(["resume", "runs/0"]),
    "resume=": lambda: main([*RUN, "seed=0", "resume=runs/0"]),
    "resume=auto": lambda: main([*RUN, "seed=0", "resume=auto", "hydra.run.dir=runs/0"]),
    "top": lambda: main(["top", "runs"]),
    "top --then": lambda: main(["top", "runs", "--k", "1", "--then", "stop_at_step=1"]),
    "diff": lambda: main(["diff", "runs/0", "runs/1"]),
    "ensemble": lambda: main(["ensemble", "runs", "--k", "2"]),
    "evaluator": lambda: evaluator.main(["runs/0"]),
    "trainkit.load of a run": lambda: load("runs/0"),
    "trainkit.load of an ensemble": lambda: load("ensemble"),
}


def load(folder: str) -> int:
    try:
        trainkit.load(folder)
    except TrainkitError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def end_well(verb: str, capfd: pytest.CaptureFixture[str], *, codes: tuple[int, ...]) -> str:
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


def replaced(kind: str, name: str) -> Change:
    return lambda root: put(kind, root / name)


def edited(name: str, change: Callable[[Any], object]) -> Change:
    def edit(root: Path) -> None:
        content = json.loads((root / name).read_text())
        change(content)
        (root / name).write_text(json.dumps(content))

    return edit


RESOLVED: Final = "runs/0/resolved.yaml"
READ_RESOLVED: Final = ("resume", "diff", "top", "ensemble", "evaluator", "trainkit.load of a run")
RESOLVED_YAML: Final[dict[str, Change]] = {
    **{f"{kind} as resolved.yaml": replaced(kind, RESOLVED) for kind in KINDS},
    "an empty resolved.yaml": write(RESOLVED, ""),
    "a resolved.yaml in latin-1": write(RESOLVED, "name: é".encode("latin-1")),
    "a list as resolved.yaml": write(RESOLVED, "- 1\n- 2\n"),
    "brackets as resolved.yaml": write(RESOLVED, "[" * 3000),
    "an alias to itself": write(RESOLVED, "name: &a [*a]\n"),
    "an alias bomb": write(
        RESOLVED, "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [{f'*a{n - 1}, ' * 9}]" for n in range(1, 40))])
    ),
    "a tag that calls": write(RESOLVED, "name: !!python/object/apply:os.getcwd []\n"),
    "a null character": write(RESOLVED, "name: a\0b\n"),
    "keys that are no texts": write(RESOLVED, "1: 2\n? [a]\n: 3\n"),
    "a large resolved.yaml": write(RESOLVED, "name: " + "x" * (2 << 20)),
    "lists in place of groups": write(RESOLVED, "model: [1]\ndata: 5\n"),
}


def _configs() -> Iterator[Any]:
    """Every config through the cheapest verb; a few through every verb, the rest in the long form."""
    for name, verb in itertools.product(RESOLVED_YAML, READ_RESOLVED):
        short = verb == "diff" or name == "a pipe as resolved.yaml"
        yield pytest.param(name, verb, id=f"{name}: {verb}", marks=[] if short else [pytest.mark.long])


@pytest.mark.parametrize(("name", "verb"), list(_configs()))
def test_a_crafted_config_of_a_run(runs: Path, capfd: pytest.CaptureFixture[str], name: str, verb: str) -> None:
    RESOLVED_YAML[name](runs)
    codes = (0,) if verb == "top" else (2, 4)
    end_well(verb, capfd, codes=codes)


RECORDS: Final[dict[str, tuple[Change, dict[str, tuple[int, ...]]]]] = {
    **{
        f"{kind} as result.json": (replaced(kind, "runs/0/result.json"), {"top": (0,), "ensemble": (0, 2)})
        for kind in KINDS
    },
    "a deep result.json": (
        write("runs/0/result.json", '{"a":' * 100_000),
        {"top": (0,), "trainkit.load of a run": (0,)},
    ),
    "figures that are none": (
        edited("runs/0/result.json", lambda it: it.update(metrics={"val/loss": "x", "val/accuracy": [1], "a": None})),
        {"top": (0,)},
    ),
    "a list of figures": (edited("runs/0/result.json", lambda it: it.update(metrics=[1])), {"top": (0,)}),
    "seconds that are a map": (edited("runs/0/result.json", lambda it: it.update(seconds={})), {"top": (0,)}),
    "a status of a megabyte": (
        edited("runs/0/result.json", lambda it: it.update(status="\033[2J" + "x" * 1_000_000)),
        {"top": (0,)},
    ),
    "a last checkpoint elsewhere": (
        edited("runs/0/result.json", lambda it: it.update(last="/etc/step_00000009")),
        {"trainkit.load of a run": (4,)},
    ),
    "a list as last checkpoint": (
        edited("runs/0/result.json", lambda it: it.update(last=[1])),
        {"trainkit.load of a run": (0,)},
    ),
    **{f"{kind} as sweep.json": (replaced(kind, "runs/sweep.json"), {"top": (4,), "ensemble": (4,)}) for kind in KINDS},
    "a list as sweep.json": (write("runs/sweep.json", "[]"), {"top": (4,)}),
    "jobs without a folder": (edited("runs/sweep.json", lambda it: it["jobs"][0].pop("folder")), {"top": (4,)}),
    "a job outside": (edited("runs/sweep.json", lambda it: it["jobs"][0].update(folder="../../etc")), {"top": (4,)}),
    "a job at the root": (edited("runs/sweep.json", lambda it: it["jobs"][0].update(folder="/etc")), {"top": (4,)}),
    "overrides of numbers": (edited("runs/sweep.json", lambda it: it["jobs"][0].update(overrides=[1])), {"top": (4,)}),
    "a text as exit code": (edited("runs/sweep.json", lambda it: it["jobs"][0].update(exit_code="0")), {"top": (4,)}),
    "a pipe as metrics": (replaced("a pipe", "runs/0/metrics.jsonl"), {"resume": (4,)}),
    "a link as metrics": (replaced("a link to a copy of itself", "runs/0/metrics.jsonl"), {"resume": (4,)}),
    "metrics that are none": (write("runs/0/metrics.jsonl", b'\xff\n[]\n{"step": "1"}\n'), {"resume": (0,)}),
    "an endless row of metrics": (write("runs/0/metrics.jsonl", b"x" * (2 << 20)), {"resume": (4,)}),
    "a pipe as lock": (replaced("a pipe", "runs/0/.lock"), {"resume": (4,)}),
    "a link as lock": (replaced("a link to a copy of itself", "runs/0/.lock"), {"resume": (4,)}),
    "a lock that is no JSON": (write("runs/0/.lock", "{"), {"resume": (2,)}),
    "a pipe as evaluations": (lambda root: put("a pipe", root / "runs/0/evaluations.jsonl"), {"evaluator": (4,)}),
    "evaluations that are none": (
        write("runs/0/evaluations.jsonl", '[]\n{"step": 1}\n{"step": 2, "checkpoint": "../x", "manifest": ""}\n'),
        {"evaluator": (0,)},
    ),
    "a pipe as evaluated.json": (
        lambda root: put("a pipe", root / "runs/0/checkpoints/evaluated.json"),
        {"evaluator": (0,)},
    ),
    "a deep model.yaml": (write("ensemble/model.yaml", "[" * 3000), {"trainkit.load of an ensemble": (2, 4)}),
    "a list as model.yaml": (write("ensemble/model.yaml", "[1]"), {"trainkit.load of an ensemble": (2, 4)}),
    "a model.yaml without weights": (
        write("ensemble/model.yaml", yaml.safe_dump({"model": {}})),
        {"trainkit.load of an ensemble": (2, 4)},
    ),
    "a model.yaml with weights that are none": (
        write("ensemble/model.yaml", yaml.safe_dump({"model": {}, "weights": {}, "tied": {}})),
        {"trainkit.load of an ensemble": (2, 4)},
    ),
    "a pipe as model.safetensors": (
        replaced("a pipe", "ensemble/model.safetensors"),
        {"trainkit.load of an ensemble": (4,)},
    ),
    "a link as model.yaml": (
        replaced("a link to a copy of itself", "ensemble/model.yaml"),
        {"trainkit.load of an ensemble": (4,)},
    ),
    "a pipe as Hydra's config": (
        lambda root: put("a pipe", root / "runs/0/.hydra/config.yaml"),
        {"top --then": (0, 2, 4)},
    ),
    "a pipe as index of the checkpoints": (replaced("a pipe", "runs/0/checkpoints/index.json"), {"resume": (0,)}),
}


def _records() -> Iterator[Any]:
    for name, (_, expected) in RECORDS.items():
        yield from (pytest.param(name, verb, id=f"{name}: {verb}") for verb in expected)


@pytest.mark.parametrize(("name", "verb"), list(_records()))
@pytest.mark.slow
def test_a_crafted_record_of_a_run_or_sweep(
    runs: Path, capfd: pytest.CaptureFixture[str], name: str, verb: str
) -> None:
    change, expected = RECORDS[name]
    change(runs)
    end_well(verb, capfd, codes=expected[verb])


CHECKPOINTS: Final[dict[str, Change]] = {
    "a pipe as manifest": lambda step: put("a pipe", step / "manifest.json"),
    "a link to /dev/zero as manifest": lambda step: put("a link to /dev/zero", step / "manifest.json"),
    "a deep manifest": lambda step: forge(step, "manifest.json", b"[" * 100_000),
    "a list as manifest": lambda step: forge(step, "manifest.json", b"[]"),
    "a manifest without a step": lambda step: forge(step, "manifest.json", lambda it: it.pop("step") and it),
    "a manifest that is not text": lambda step: forge(step, "manifest.json", b"\xff\xfe\x00"),
    "a meta without a state": lambda step: forge(step, "meta.json", lambda it: it.pop("state") and it),
    "a link as tensors": lambda step: put("a link to a copy of itself", step / "rank_00000.safetensors"),
    "a link as step": lambda step: put("a link to a copy of itself", step),
}


def _checkpoints() -> Iterator[Any]:
    for place, name in enumerate(CHECKPOINTS):
        verbs = ("resume", "resume=auto", "resume=", "evaluator")
        short, long = verbs[place % 4], verbs[(place + 2) % 4]
        yield pytest.param(name, short, id=f"{name}: {short}")
        yield pytest.param(name, long, id=f"{name}: {long}", marks=pytest.mark.long)


@pytest.mark.parametrize(("name", "verb"), list(_checkpoints()))
@pytest.mark.slow
def test_a_crafted_checkpoint_is_passed_over_for_the_one_before(
    runs: Path, capfd: pytest.CaptureFixture[str], name: str, verb: str
) -> None:
    CHECKPOINTS[name](runs / "runs/0/checkpoints/step_00000002")
    end_well(verb, capfd, codes=(0,))


@pytest.mark.parametrize("verb", ["resume", "resume=", "trainkit.load of a run"])
def test_where_no_checkpoint_is_left_all_are_named(runs: Path, capfd: pytest.CaptureFixture[str], verb: str) -> None:
    for step in (1, 2):
        put("a pipe", runs / f"runs/0/checkpoints/step_0000000{step}/manifest.json")
    end_well(verb, capfd, codes=(2, 4))


def test_the_reason_and_the_checkpoint_that_is_used_stand_on_the_screen(
    runs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    put("a pipe", runs / "runs/0/checkpoints/step_00000002/manifest.json")
    capfd.readouterr()
    with within(60):
        assert main(["resume", "runs/0", "quiet=false"]) == 0
    said = "".join(capfd.readouterr())
    assert "manifest.json cannot be read (it is a named pipe). Using step_00000001 instead." in said


def linked_checkpoints(root: Path) -> None:
    put("a link to a copy of itself", root / "runs/0/checkpoints")
    edited("runs/0/result.json", lambda it: it.update(last=None))(root)


DOCUMENTED: Final[dict[str, tuple[Change, str]]] = {
    "resume": (
        lambda root: put("a pipe", root / "runs/0/metrics.jsonl"),
        "runs/0/metrics.jsonl cannot be read: it is a named pipe.",
    ),
    "top": (
        edited("runs/sweep.json", lambda it: it["jobs"][0].update(folder="../0")),
        "runs/sweep.json cannot be read: its job '0' lies outside the folder of the sweep.",
    ),
    "trainkit.load of a run": (
        linked_checkpoints,
        (
            "the checkpoints in runs/0/checkpoints cannot be read: "
            "it is a symbolic link, and trainkit follows none inside its own folders."
        ),
    ),
}


@pytest.mark.parametrize("verb", DOCUMENTED)
def test_the_documented_texts_are_those_of_the_verbs(runs: Path, capfd: pytest.CaptureFixture[str], verb: str) -> None:
    change, text = DOCUMENTED[verb]
    change(runs)
    assert text in end_well(verb, capfd, codes=(4,))


def test_the_target_of_a_linked_lock_is_left_as_it_is(runs: Path) -> None:
    (runs / "precious").write_text("mine")
    (runs / "runs/0/.lock").unlink()
    (runs / "runs/0/.lock").symlink_to(runs / "precious")
    assert main(["resume", "runs/0"]) == 4
    assert (runs / "precious").read_text() == "mine"
