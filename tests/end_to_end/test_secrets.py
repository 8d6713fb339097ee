"""A secret that a verb, a file of a run or a command line of a process shows is caught here alone, by a canary."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import quick
from tests.support.settings import latest
from trainkit.cli import main

CANARY = "canary7Qx9-z2W4"
OWN = "canary8Kd3-v6L1"
SMALL = ["recipe=null", "steps=3", "callbacks=[]", "logger=[]", "--allow-package", "tests"]
PLAIN = ["+logger.w._target_=tests.end_to_end.vault.Vault", "+logger.w.project=digits"]
SECRETS = [
    f"logger.w.api_key={CANARY}",
    f"logger.w.url=http://me:{CANARY}@host/x",
    f"logger.w.headers={{A:{CANARY},n:5}}",
    f"logger.w.tokens=[{CANARY}]",
    f"logger.w.mark={CANARY}",
    f"logger.w.door.code={CANARY}",
]
ALL = [*SMALL, *PLAIN, *(f"+{line}" for line in SECRETS)]
WHOLE = f"0 True {len(CANARY) * 6 + len('http://me:@host/x')}"
"""What `Vault` sees: no command line with the canary, and every secret as it was given."""


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
        ["--cfg", "all", f"+hydra.job.env_set.WANDB_API_KEY={CANARY}"],
        ["plan"],
        ["emit", "slurm"],
        ["emit", "kubernetes", "--image", "a"],
    ],
)
def test_what_a_verb_prints_holds_no_secret(clean: Callable[..., str], arguments: list[str]) -> None:
    assert clean(*arguments, *ALL)


def test_an_error_shows_the_key_and_no_secret(clean: Callable[..., str]) -> None:
    printed = clean(*latest(*ALL, "+logger.w.mark=5"), f"logger.w.size={CANARY}", code=2)
    assert "logger.w.mark=(redacted): must be text." in printed
    assert "logger.w.size=(redacted): must be a whole number." in printed
    printed = clean(f"logger.w.api_key={CANARY} (", code=2)
    assert "logger.w.api_key=(redacted): has a character that needs quotes." in printed
    printed = clean("-m", *SMALL, f"logger.w.api_key={CANARY},b", code=2)
    assert "logger.w.api_key=(redacted): is a secret, which cannot be swept" in printed


@pytest.mark.slow
def test_a_run_its_traceback_and_its_resume_hold_no_secret(cwd: Path, clean: Callable[..., str]) -> None:
    assert "refuses (redacted) and (redacted)" in clean(*ALL, "logger.w.quotes=true", "name=failed", code=1)
    printed = clean(*ALL, "name=a", "stop_at_step=2")
    (run,) = (cwd / "outputs/a").iterdir()
    assert (run / "seen").read_text().endswith(WHOLE[2:])
    place = run.relative_to(cwd)
    assert (
        f"trainkit resume --allow-package tests {place} 'logger.w.api_key=${{oc.env:W_API_KEY}}' 'logger.w.url="
        in printed
    )
    assert "logger.w.api_key=(redacted): a secret is not kept" in clean("resume", str(place), *SMALL[-2:], code=2)
    clean("resume", str(place), *SMALL[-2:], *SECRETS)
    assert "no difference" in clean("diff", str(place), str(place))


@pytest.mark.slow
def test_a_reference_is_kept_and_its_value_is_not(
    cwd: Path, clean: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", CANARY)
    given = [f"+{line}".replace(CANARY, "${oc.env:A_KEY}") for line in SECRETS if "url" not in line]
    given[1] = "+logger.w.headers.A=${oc.env:A_KEY}"
    clean(*SMALL, *PLAIN, *given, "name=a", "stop_at_step=2")
    (run,) = (cwd / "outputs/a").iterdir()
    assert (run / "seen").read_text().endswith(str(len(CANARY) * 5))
    assert "    api_key: ${oc.env:A_KEY}\n" in (run / "resolved.yaml").read_text()
    clean("resume", str(run), *SMALL[-2:])
    monkeypatch.delenv("A_KEY")
    assert "logger.w.api_key=${oc.env:A_KEY}: refers to the environment variable A_KEY, which is not set here. " in (
        clean("resume", str(run), *SMALL[-2:], code=2)
    )


def test_the_processes_of_a_run_show_no_secret(cwd: Path) -> None:
    own = [line.replace(CANARY, OWN) for line in ALL]  # a test beside this one may start processes with the other
    command = [sys.executable, "-m", "trainkit", *own, "strategy=mirrored", "strategy.replicas=2", "name=a"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (run,) = (cwd / "outputs/a").iterdir()
    assert (run / "seen").read_text() == WHOLE
    assert OWN not in done.stdout + done.stderr
    assert hits(cwd, OWN) == []


def test_a_sweep_its_leaderboard_and_what_is_made_of_it_hold_no_secret(cwd: Path, clean: Callable[..., str]) -> None:
    arguments = ["-m", *ALL, "sweep.name=a", "seed=1,2", f"+hydra.job.env_set.WANDB_API_KEY={CANARY}"]
    done = subprocess.run(quick.command(*arguments), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert CANARY not in done.stdout + done.stderr
    sweep = cwd / "outputs/sweeps/a"
    assert {(sweep / job / "seen").read_text()[2:] for job in "01"} == {WHOLE[2:]}
    assert re.search(
        r"the best run again: trainkit --allow-package tests recipe=null .*'\+logger.w.api_key=\$\{oc.env:W_API_KEY\}'",
        done.stdout,
    )
    assert '"+logger.w.api_key=(redacted)"' in (sweep / "sweep.json").read_text()
    clean("report", str(sweep))
    clean("report", str(sweep / "0"), str(sweep / "1"))
    assert (sweep / "report.html").is_file()
    clean("top", str(sweep))
    clean("ensemble", str(sweep), "--k", "2")
    assert "logger.w.tokens=(redacted): a secret is not kept" in clean("top", str(sweep), "--then", code=2)


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
