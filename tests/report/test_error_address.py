"""The address below an error leads to a section of the docs, and every section is the address of some error."""

import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.packaging.conftest import ROOT
from trainkit import cli, errors, redaction
from trainkit.config.schema import RunConfig, hints_of
from trainkit.errors import ConfigError, MissingExtraError, Problem, TrainkitError
from trainkit.exporting.trained import NotExportableError
from trainkit.report.error_address import (
    COMMAND_LINE,
    LAUNCH,
    OTHER_KEYS,
    SECTIONS,
    TARGETS,
    address_line,
    anchor_of_problem,
    sections,
)

BY_KEY = {*SECTIONS, COMMAND_LINE, LAUNCH, OTHER_KEYS, TARGETS}


def kinds(base: type[TrainkitError] = TrainkitError) -> Iterator[type[TrainkitError]]:
    yield base
    for kind in base.__subclasses__():
        if kind.__module__.startswith("trainkit."):
            yield from kinds(kind)


def test_every_address_is_a_section_of_the_page() -> None:
    assert NotExportableError in kinds()
    assert {*BY_KEY, *(kind.anchor for kind in kinds())} - {*sections()} == set()
    assert len(sections()) == len(re.findall(r"^##+ ", (ROOT / "docs/errors.md").read_text(), re.MULTILINE))


def test_every_section_of_a_kind_is_the_address_of_some_error() -> None:
    page = [*sections()]
    kinds_of_errors = page[page.index("every-kind-of-error") + 1 :]
    assert {*kinds_of_errors} - {*BY_KEY, *(kind.anchor for kind in kinds())} == set()


def test_every_key_of_a_run_has_a_section_or_names_no_setting() -> None:
    keys = {name for name in hints_of(RunConfig) if anchor_of_problem(Problem(key=name, rule="")) == OTHER_KEYS}
    assert keys == {"quiet"}


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    """Standard output and standard error are terminals."""
    monkeypatch.setattr(redaction._MaskedStream, "isatty", lambda _: True, raising=False)
    return capsys


MISTAKES = {
    "length-of-the-run": ["epochs=two"],
    "shards-of-a-step": ["batch.micro_size=0"],
    "optimizer-and-learning-rate": ["optimizer=adamv"],
    "model": ["model=mpl"],
    "compiling-and-memory": ["compile.mode=fast"],
    "objective": ["objective=none"],
    "data-and-loader": ["loader.num_workers=-1"],
    "strategy": ["strategy=mirorred"],
    "precision-and-reproducibility": ["precision=fp33"],
    "cluster-and-launch": ["cluster=locale"],
    "evaluation": ["eval.every_steps=0"],
    "callbacks-and-loggers": ["log_every_steps=0"],
    "hardware-of-a-plan": ["hardware=abacus"],
    "sweeps-and-searches": ["-m", "sweep.slots=-2", "seed=0,1"],
    "runs-and-resuming": ["init_from=1", "name="],
    "recipes": ["recipe=digitz"],
    "a-target-that-is-refused": ["model._target_=os.system"],
    "command-line": ["--nothing"],
    "other-keys-and-files": ["epohcs=3"],
}


@pytest.mark.parametrize("section", MISTAKES)
def test_a_mistake_on_the_command_line_ends_with_the_address_of_its_section(
    section: str, terminal: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(MISTAKES[section]) == 2
    last = terminal.readouterr().err.splitlines()[-1]
    assert last == f"More: trainkit explain errors.{section}"
    assert cli.main(shlex.split(last)[2:]) == 0
    assert terminal.readouterr().out.startswith(sections()[section])


def test_the_mistakes_are_those_of_every_section_of_keys() -> None:
    assert {*MISTAKES} == BY_KEY


OF_CLASSES = [name for name in errors.__all__ if name.endswith("Error") and name != "ConfigError"]


@pytest.mark.parametrize("name", [name for name in OF_CLASSES if name != "MissingExtraError"])
def test_an_error_of_any_class_ends_with_the_address_of_its_section_once(
    name: str, monkeypatch: pytest.MonkeyPatch, terminal: pytest.CaptureFixture[str]
) -> None:
    kind: type[TrainkitError] = getattr(errors, name)
    error = kind.__new__(kind)
    TrainkitError.__init__(error, "it failed.")
    monkeypatch.setattr(cli, "_dispatch", lambda _: (_ for _ in ()).throw(error))
    cli.main(["ls"])
    assert terminal.readouterr().err == f"it failed.\nMore: trainkit explain errors.{kind.anchor}\n"


def test_a_missing_package_has_a_section_whatever_key_needs_it() -> None:
    error = MissingExtraError(key="logger.wandb", package="wandb", extra="wandb")
    assert address_line(error) == "More: trainkit explain errors.a-package-that-is-missing"


def test_one_line_names_three_sections_at_most() -> None:
    problems = [Problem(key=key, rule="is wrong.") for key in ("batch", "model", "batch.micro_size", "seed", "data")]
    found = address_line(ConfigError(problems))
    assert found == "More: trainkit explain errors.shards-of-a-step errors.model errors.precision-and-reproducibility"
    assert cli.main(shlex.split(found)[2:]) == 0


def test_a_hostile_key_chooses_among_the_sections_only() -> None:
    found = address_line(ConfigError([Problem(key="</script>\x1b[31m#batch", rule="is wrong.")]))
    assert found == f"More: trainkit explain errors.{OTHER_KEYS}"


def test_a_terminal_gets_the_address_and_a_pipe_the_error_alone() -> None:
    error = "1 problem in the config\n  --nothing: no such flag. trainkit --help shows them. (command line)\n"
    command = [sys.executable, "-m", "trainkit", "--nothing"]
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(command, stderr=theirs, check=False)
        printed = os.read(ours, 4096).decode().replace("\r\n", "\n")
    finally:
        os.close(ours)
        os.close(theirs)
    assert (done.returncode, printed) == (2, f"{error}More: trainkit explain errors.{COMMAND_LINE}\n")
    assert subprocess.run(command, capture_output=True, text=True, check=False).stderr == error


def test_a_section_is_shown_without_marks_and_another_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "errors.files-that-cannot-be-written"]) == 0
    assert capsys.readouterr().out == (
        "Files that cannot be written\n\n"
        "Cause: a file system is full, read-only or missing, or a limit is reached. Remedy: see the table\n"
        "above (errors.loss-that-is-not-finite); `trainkit resume RUN` continues.\n"
    )
    assert cli.main(["explain", "errors"]) == 0
    assert "errors.out-of-memory\n" in capsys.readouterr().out
    assert cli.main(["explain", "errors.out-of-memori"]) == 2
    assert "no such section. Did you mean errors.out-of-memory? (command line)" in capsys.readouterr().err
