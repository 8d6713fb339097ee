"""A template that does not train as it is written, or hides an installed package, is caught here alone."""

import errno
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.packaging.conftest import ROOT
from tests.support import quick
from trainkit.cli import main


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has a search path of its own: the command line adds the current folder to it."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_a_name_that_cannot_be_a_package_is_refused_and_nothing_is_written(
    cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (cwd / "full").mkdir()
    (cwd / "full" / "mine.txt").write_text("mine")
    (cwd / "file").write_text("mine")
    for name, answer in (
        ("my-net", "ASCII letters, digits and _, 100 at most. For example my_net."),
        ("class", "must be the name of a Python package"),
        ("../garden", "For example garden."),
        ("größe", "ASCII letters"),
        ("torch", "is an existing module, which this package would hide. Choose another, such as my_torch."),
        ("timm", "is an existing module"),  # of the six packages that a config may name, though it is not installed
        ("conf", "is the name of a folder next to the package"),
        ("full", "this folder exists and is not empty."),
        ("file", "a file of this name exists here."),
    ):
        assert main(["init", name]) == 2
        assert answer in capsys.readouterr().err
    assert sorted(path.name for path in cwd.rglob("*")) == ["file", "full", "mine.txt"]


def test_an_empty_folder_is_filled(cwd: Path) -> None:
    (cwd / "garden").mkdir()
    assert main(["init", "garden"]) == 0
    assert (cwd / "garden" / "garden" / "model.py").is_file()
    written = [path for path in (cwd / "garden").rglob("*") if path.is_file()]
    assert not [path for path in written if "own_package" in path.read_text()]


def test_a_package_that_cannot_be_written_whole_is_not_begun(
    cwd: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = Path.write_text

    def full(path: Path, *arguments: str, **options: str) -> int:
        if path.name == "pyproject.toml":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", full)
    assert main(["init", "garden"]) == 4
    assert "garden cannot be written: No space left on device" in capsys.readouterr().err
    assert list(cwd.iterdir()) == []


@pytest.mark.long
def test_every_command_of_its_readme_runs_in_the_folder_itself(cwd: Path) -> None:
    assert main(["init", "garden"]) == 0
    blocks = re.findall(r"```bash\n(.*?)```", (cwd / "garden" / "README.md").read_text(), re.DOTALL)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "".join(blocks)],
        cwd=cwd / "garden", env=os.environ | {"PATH": quick.path()}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "  the same training as one_device, as a user would start them: yes\n" in done.stdout
    assert "2 passed" in done.stdout
    first = min((cwd / "garden" / "outputs" / "spirals").glob("*/milestones.txt"))
    assert first.read_text().startswith("70% at step ")
    assert len(list((cwd / "garden" / "outputs" / "sweeps").glob("*/*/result.json"))) == 2


def test_the_template_is_in_the_wheel_whole(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    files = [path for path in (ROOT / "template").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert not {f"trainkit/{path.relative_to(ROOT)}" for path in files} - names
