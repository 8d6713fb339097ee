"""An error whose last line leads to a section that the docs do not have, or that is printed into a pipe, is caught
here alone.
"""

import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.packaging.conftest import ROOT
from trainkit import cli, redaction
from trainkit.config.schema import RunConfig, hints_of
from trainkit.errors import ConfigError, DataError, MissingExtraError, Problem, TrainkitError
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


def kinds(base: type[TrainkitError] = TrainkitError) -> Iterator[type[TrainkitError]]:
    yield base
    for kind in base.__subclasses__():
        if kind.__module__.startswith("trainkit."):
            yield from kinds(kind)


def test_every_address_is_a_section_of_the_page_and_every_section_of_a_kind_an_address() -> None:
    page, found = [*sections()], {*kinds()}
    addresses = {*SECTIONS, COMMAND_LINE, LAUNCH, OTHER_KEYS, TARGETS, *(kind.anchor for kind in found)}
    assert NotExportableError in found
    assert addresses - {*page} == set()
    assert {*page[page.index("every-kind-of-error") + 1 :]} - addresses == set()
    assert len(page) == len(re.findall(r"^##+ ", (ROOT / "docs/errors.md").read_text(), re.MULTILINE))


def test_every_key_of_a_run_has_a_section_or_names_no_setting() -> None:
    keys = {name for name in hints_of(RunConfig) if anchor_of_problem(Problem(key=name, rule="")) == OTHER_KEYS}
    assert keys == {"quiet"}


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    """Standard output and standard error are terminals."""
    monkeypatch.setattr(redaction._MaskedStream, "isatty", lambda _: True, raising=False)
    return capsys


@pytest.mark.parametrize(
    ("section", "arguments"),
    [
        ("shards-of-a-step", ["batch.micro_size=0"]),
        ("strategy", ["strategy=mirorred"]),
        ("sweeps-and-searches", ["-m", "sweep.slots=-2", "seed=0,1"]),
        ("recipes", ["recipe=digitz"]),
        (TARGETS, ["model._target_=os.system"]),
        (COMMAND_LINE, ["--nothing"]),
        (OTHER_KEYS, ["epohcs=3"]),
    ],
)
def test_a_mistake_on_the_command_line_ends_with_the_address_of_its_section(
    section: str, arguments: list[str], terminal: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    last = terminal.readouterr().err.splitlines()[-1]
    assert last == f"More: trainkit explain errors.{section}"
    assert cli.main(shlex.split(last)[2:]) == 0
    assert terminal.readouterr().out.startswith(sections()[section])


def test_an_error_of_a_class_ends_with_the_address_of_its_section(
    monkeypatch: pytest.MonkeyPatch, terminal: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_dispatch", lambda _: (_ for _ in ()).throw(DataError("it failed.")))
    cli.main(["ls"])
    assert terminal.readouterr().err == f"it failed.\nMore: trainkit explain errors.{DataError.anchor}\n"
    missing = MissingExtraError(key="logger.wandb", package="wandb", extra="wandb")
    assert address_line(missing) == "More: trainkit explain errors.a-package-that-is-missing"


def test_one_line_names_three_sections_at_most_and_no_hostile_key() -> None:
    def found(*keys: str) -> str:
        return address_line(ConfigError([Problem(key=key, rule="is wrong.") for key in keys]))

    sections_of_keys = "errors.shards-of-a-step errors.model errors.precision-and-reproducibility"
    assert found("batch", "model", "batch.micro_size", "seed", "data") == f"More: trainkit explain {sections_of_keys}"
    assert found("</script>\x1b[31m#batch") == f"More: trainkit explain errors.{OTHER_KEYS}"


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
    shown = capsys.readouterr().out
    assert shown.startswith("Files that cannot be written\n\nCause: ")
    assert "(errors.loss-that-is-not-finite); `trainkit resume RUN` continues.\n" in shown
    assert cli.main(["explain", "errors"]) == 0
    assert "errors.out-of-memory\n" in capsys.readouterr().out
    assert cli.main(["explain", "errors.out-of-memori"]) == 2
    assert "Did you mean errors.out-of-memory?" in capsys.readouterr().err
