"""A verb that builds what an edited run folder or an argument names, outside of allowed packages, is caught here."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import trainkit
from tests.support.attempts import ATTEMPTS, filled, set_up
from tests.support.settings import latest
from trainkit.cli import main
from trainkit.config.schema import load_resolved
from trainkit.errors import ConfigError
from trainkit.run.session import evaluator_main as evaluator

ROOT = Path(__file__).resolve().parents[2]
RUN = ("recipe=null", "steps=1", "callbacks=[]", "logger=[]", "quiet=true", "model.hidden=[8]")
NAMES = ("os.system as data", "a callback")
"""Attempts on two ways into a config; tests/config/test_allowed_targets.py makes all of them."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs in a folder."""
    root = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        trainkit.train(trainkit.compose([*RUN, f"seed={seed}"]), run_dir=root / str(seed))
    return root


@pytest.fixture
def edited(runs: Path, cwd: Path) -> Callable[[str], Path]:
    """Copies of the runs, and a way to put an attempt into the config of both; returns the canary."""
    canary = set_up(cwd)
    shutil.copytree(runs, cwd / "runs")

    def edit(name: str) -> Path:
        group, node = ATTEMPTS[name]
        node = {"evil": node} if group in ("callbacks", "logger") else node
        for file in [*Path("runs").glob("*/resolved.yaml"), *Path("runs").glob("*/.hydra/config.yaml")]:
            values = yaml.load(file.read_text(), yaml.CSafeLoader)
            file.write_text(yaml.dump({**values, group: filled(node, cwd)}, Dumper=yaml.CSafeDumper))
        return canary

    return edit


ENTRIES: dict[str, Callable[[], object]] = {
    "resume": lambda: main(["resume", "runs/0"]),
    "resume=": lambda: main([*RUN, "resume=runs/0"]),
    "top --then": lambda: main(["top", "runs", "--then"]),
    "ensemble": lambda: main(["ensemble", "runs", "--k", "2"]),
    "evaluator": lambda: evaluator.main(["runs/0"]),
    "trainkit.load": lambda: trainkit.load("runs/0"),
    "trainkit.train": lambda: trainkit.train(load_resolved("runs/0/resolved.yaml"), run_dir="new"),
}
UNBUILT = {
    *(("resume=", name) for name in NAMES),  # the command line says all of the config, and the run only its step
    *((entry, "a callback") for entry in ("ensemble", "evaluator", "trainkit.load")),
    ("trainkit.load", "os.system as data"),
}
"""What an entry does not build of the run that it reads, so that it may end well."""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("entry", ENTRIES)
def test_an_edited_run_folder_runs_nothing(edited: Callable[[str], Path], entry: str, name: str) -> None:
    canary = edited(name)
    try:
        code = ENTRIES[entry]()
    except ConfigError as error:
        code = error.exit_code
    assert code == 2 or (entry, name) in UNBUILT
    assert not canary.exists()


def test_a_module_beside_a_run_is_left(
    edited: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, cwd: Path
) -> None:
    monkeypatch.syspath_prepend(cwd)
    canary = edited("a module that is imported")
    for entry in ENTRIES.values():
        with contextlib.suppress(ConfigError):
            entry()
    for line in (["diff", "runs/0", "runs/1"], ["top", "runs"], ["ls"]):
        main(line)
    assert not canary.exists()
    assert "evil_module" not in sys.modules


def test_a_worker_builds_nothing_that_its_parent_did_not_allow(edited: Callable[[str], Path], cwd: Path) -> None:
    canary = edited("a module that is imported")
    command = [sys.executable, "-m", "trainkit.run.worker_main", "runs/0/resolved.yaml"]
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("TRAINKIT_")}
    environ = {**inherited, "PYTHONPATH": os.pathsep.join([str(ROOT), str(cwd)])}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "model._target_=evil_module.inner.Net: evil_module is not among the packages" in done.stderr
    assert not canary.exists()


def test_an_ensemble_that_was_written_runs_nothing(runs: Path, cwd: Path) -> None:
    canary = set_up(cwd)
    shutil.copytree(runs, cwd / "runs")
    assert main(["ensemble", "runs", "--k", "2"]) == 0
    file = Path("runs/ensemble/model.yaml")
    content = yaml.safe_load(file.read_text())
    for name in ("a module of torch's imports", "a list of nodes", "os.system"):
        file.write_text(yaml.safe_dump({**content, "model": filled(ATTEMPTS[name][1], cwd)}))
        with pytest.raises(ConfigError):
            trainkit.load("runs/ensemble")
    assert not canary.exists()


def test_a_sweep_that_goes_on_runs_nothing_of_its_folder(edited: Callable[[str], Path], cwd: Path) -> None:
    canary = edited("os.system as data")
    command = ["touch", str(canary)]
    jobs = [{"job": "0", "overrides": ["data._target_=os.system"], "command": command, "exit_code": 1}]
    Path("runs/sweep.json").write_text(json.dumps({"command": command, "jobs": jobs}))
    line = ["-m", *RUN, "seed=0,1", "sweep.resume=runs", "data._target_=os.system", f"+data.command=touch {canary}"]
    assert main(line) == 2
    assert not canary.exists()


@pytest.mark.slow
def test_an_allowed_class_is_trained_resumed_and_evaluated(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("test_own_mlp.py").write_text("from trainkit.models.mlp import Mlp\nclass Own(Mlp): pass\n")
    monkeypatch.syspath_prepend(cwd)
    monkeypatch.setenv("PYTHONPATH", str(cwd))
    allow, two = ["--allow-package", "test_own_mlp"], ["strategy=mirrored", "strategy.replicas=2"]
    model = ["model._target_=test_own_mlp.Own", "checkpoint.keep_last=1"]
    assert main([*allow, *latest(*RUN, *model, *two, "steps=2", "stop_at_step=1", "hydra.run.dir=run")]) == 0
    assert main([*allow, "resume", "run"]) == 0
    assert evaluator.main(["run", "--allow-package", "test_own_mlp"]) == 0
    assert (main(["resume", "run"]), evaluator.main(["run"])) == (2, 2)
    assert type(trainkit.load("run", packages=["test_own_mlp"])).__name__ == "Own"
