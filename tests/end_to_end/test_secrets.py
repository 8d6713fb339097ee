"""A secret of the environment in a file, on a screen or in the command line of a process is caught here alone."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import quick
from trainkit.cli import main

CANARY = "canary7Qx9-z2W4"
SMALL = ["recipe=null", "steps=3", "callbacks=[]", "logger=[]", "--allow-package", "tests"]
PLAIN = ["+logger.w._target_=tests.end_to_end.vault.Vault", "+logger.w.project=digits"]
REFERENCE = "${oc.env:A_KEY}"
SECRETS = [
    f"+logger.w.api_key={REFERENCE}",
    f"+logger.w.headers.A={REFERENCE}",
    f"+logger.w.tokens=[{REFERENCE}]",
    f"+logger.w.mark={REFERENCE}",
    f"+logger.w.door.code={REFERENCE}",
]
ALL = [*SMALL, *PLAIN, *SECRETS]
WHOLE = f"0 {len(CANARY) * 5}"
"""What `Vault` sees: no command line with the canary, and every secret as it was given."""


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", CANARY)


@pytest.fixture
def clean(cwd: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command in this process; what it prints, and the folder, hold no canary."""

    def run(*arguments: str, code: int = 0) -> str:
        assert main(arguments) == code
        printed = "".join(capfd.readouterr())
        assert CANARY not in printed
        assert hits(cwd) == []
        return printed

    return run


def hits(folder: Path, canary: str = CANARY) -> list[str]:
    files = {file: file.read_bytes() if file.is_file() else b"" for file in folder.rglob("*")}
    return [str(file) for file, content in files.items() if canary in str(file) or canary.encode() in content]


@pytest.mark.parametrize(
    "arguments",
    [
        ["explain", "logger"],
        ["explain", "logger.w.mark"],
        ["--cfg", "job"],
        ["--cfg", "all"],
        ["plan"],
        ["emit", "slurm"],
        ["emit", "kubernetes", "--image", "a"],
    ],
)
def test_what_a_verb_prints_holds_no_secret(clean: Callable[..., str], arguments: list[str]) -> None:
    assert clean(*arguments, *ALL)


LITERAL = f"+logger.w.api_key={CANARY}"


@pytest.mark.parametrize(
    ("verb", "line"),
    [
        ([], LITERAL),
        (["-m", "seed=1,2"], LITERAL),
        (["plan"], LITERAL),
        ([], f"+logger.w.headers={{A:{CANARY},n:5}}"),
        ([], f"+logger.w.mark={CANARY}"),
        ([], f"+logger.w.door.code={CANARY}"),
        ([], f"+logger.w.project=http://me:{CANARY}@host/x"),
        ([], f"+logger.w.api_key=${{oc.env:NOT_SET,{CANARY}}}"),
    ],
    ids=["train", "sweep", "plan", "mapping", "mark", "part", "url", "default"],
)
def test_a_literal_secret_is_refused_and_not_shown(
    cwd: Path, clean: Callable[..., str], verb: list[str], line: str
) -> None:
    printed = clean(*verb, *SMALL, PLAIN[0], line, code=2)
    key = line.removeprefix("+").partition("=")[0]
    assert f"{key}=" in printed
    assert "(redacted)" in printed
    assert [*cwd.iterdir()] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "key"),
    [
        (f"+hydra.job.env_set.WANDB_API_KEY={CANARY}", "hydra.job.env_set.WANDB_API_KEY"),
        (f"+hydra.job.env_set={{WANDB_API_KEY: {CANARY}}}", "hydra.job.env_set"),
        (f"logger.w.api_key={CANARY} (", "logger.w.api_key"),  # cannot be parsed
    ],
)
def test_a_literal_secret_is_refused_also_where_trainkit_reads_no_value(
    clean: Callable[..., str], line: str, key: str
) -> None:
    assert f"{key}=(redacted): is a secret" in clean(*SMALL, line, code=2)


def test_a_refusal_names_the_variable_to_write(clean: Callable[..., str]) -> None:
    assert clean(*SMALL, PLAIN[0], f"+logger.w.api_key={CANARY}", code=2) == (
        "1 problem in the config\n"
        "  logger.w.api_key=(redacted): is a secret, and files and process lists would show it. Set a variable, and "
        "write 'logger.w.api_key=${oc.env:W_API_KEY}'. (command line)\n"
    )


@pytest.mark.slow
def test_a_run_its_traceback_and_its_resume_hold_no_secret(
    cwd: Path, clean: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "refuses (redacted) and (redacted)" in clean(*ALL, "+logger.w.quotes=true", "name=failed", code=1)
    clean(*ALL, "name=a", "stop_at_step=2")
    (run,) = (cwd / "outputs/a").iterdir()
    assert (run / "seen").read_text() == WHOLE
    assert f"    api_key: {REFERENCE}\n" in (run / "resolved.yaml").read_text()
    clean("resume", str(run), *SMALL[-2:])
    assert "no difference" in clean("diff", str(run), str(run))
    monkeypatch.delenv("A_KEY")
    assert "logger.w.api_key=${oc.env:A_KEY}: refers to the environment variable A_KEY, which is not set here. " in (
        clean("resume", str(run), *SMALL[-2:], code=2)
    )


def test_the_processes_of_a_run_show_no_secret(cwd: Path) -> None:
    command = quick.command(*ALL, "strategy=mirrored", "strategy.replicas=2", "name=a")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (run,) = (cwd / "outputs/a").iterdir()
    assert (run / "seen").read_text() == WHOLE
    assert CANARY not in done.stdout + done.stderr
    assert hits(cwd) == []


def test_a_sweep_its_leaderboard_and_what_is_made_of_it_hold_no_secret(cwd: Path, clean: Callable[..., str]) -> None:
    arguments = ["-m", *ALL, "sweep.name=a", "seed=1,2", "hydra.sweep.subdir=${hydra.job.override_dirname}"]
    done = subprocess.run(quick.command(*arguments), capture_output=True, text=True, check=False, env={**os.environ})
    assert done.returncode == 0, done.stderr
    assert CANARY not in done.stdout + done.stderr
    sweep = cwd / "outputs/sweeps/a"
    assert {file.read_text() for file in sweep.rglob("seen")} == {WHOLE}
    assert "'+logger.w.api_key=${oc.env:A_KEY}'" in done.stdout
    clean("report", str(sweep))
    clean("top", str(sweep))
    clean("ensemble", str(sweep), "--k", "2")


@pytest.mark.slow
def test_prove_shows_no_secret(
    clean: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    clean("prove", *ALL, "strategy=mirrored", "strategy.replicas=2", "--steps", "2")
    assert hits(cache) == []
    (record,) = (cache / "trainkit/proofs").iterdir()
    command = json.loads(record.read_text())["command"]
    assert command.startswith("trainkit prove --allow-package tests recipe=null steps=3 ")
