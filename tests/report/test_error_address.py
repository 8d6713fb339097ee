"""An error whose last line leads to a section that the docs do not have, or that is printed into a pipe, is caught
here alone.
"""

import re
import shlex
from collections.abc import Iterator

import pytest

from tests.packaging.conftest import ROOT
from trainkit import cli, redaction
from trainkit.errors import TrainkitError
from trainkit.report.error_address import (
    COMMAND_LINE,
    LAUNCH,
    OTHER_KEYS,
    SECTIONS,
    TARGETS,
    sections,
)
from trainkit.trained.checking import NotExportableError


def kinds(base: type[TrainkitError] = TrainkitError) -> Iterator[type[TrainkitError]]:
    yield base
    for kind in base.__subclasses__():
        if kind.__module__.startswith("trainkit."):
            yield from kinds(kind)


def test_every_address_is_a_section_of_the_page_and_every_section_of_a_kind_an_address() -> None:
    page, problem_kinds = [*sections()], {*kinds()}
    addresses = {*SECTIONS, COMMAND_LINE, LAUNCH, OTHER_KEYS, TARGETS, *(kind.anchor for kind in problem_kinds)}
    assert NotExportableError in problem_kinds
    assert addresses - {*page} == set()
    assert {*page[page.index("every-kind-of-error") + 1 :]} - addresses == set()
    assert len(page) == len(re.findall(r"^##+ ", (ROOT / "docs/errors.md").read_text(), re.MULTILINE))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    """Standard output and standard error are terminals."""
    monkeypatch.setattr(redaction._MaskedStream, "isatty", lambda _: True, raising=False)
    return capsys


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "arguments"),
    [
        ("shards-of-a-step", ["batch.micro_size=0"]),
        ("sweeps-and-searches", ["-m", "sweep.slots=-2", "seed=0,1"]),
        (TARGETS, ["model._target_=os.system"]),
        (COMMAND_LINE, ["--nothing"]),
        (OTHER_KEYS, ["epohcs=3"]),
    ],
)
def test_a_mistake_ends_with_the_address_of_its_section_on_a_terminal_and_not_in_a_pipe(
    section: str, arguments: list[str], terminal: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as piped:
        piped.setattr(redaction._MaskedStream, "isatty", lambda _: False, raising=False)
        assert cli.main(arguments) == 2
    assert "More: " not in terminal.readouterr().err
    assert cli.main(arguments) == 2
    last = terminal.readouterr().err.splitlines()[-1]
    assert last == f"More: trainkit explain errors.{section}"
    assert cli.main(shlex.split(last)[2:]) == 0
    assert terminal.readouterr().out.startswith(sections()[section])


def test_a_section_is_shown_without_marks_and_another_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "errors.files-that-cannot-be-written"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Files that cannot be written\n\nCause: ")
    assert "(errors.loss-that-is-not-finite); `trainkit resume RUN` continues.\n" in shown
    assert cli.main(["explain", "errors"]) == 0
    assert "errors.out-of-memory\n" in capsys.readouterr().out
    assert cli.main(["explain", "errors.out-of-memori"]) == 2
    assert "Did you mean errors.out-of-memory?" in capsys.readouterr().err
