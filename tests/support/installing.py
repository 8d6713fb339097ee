"""The wheel, built once a session, and an environment of its own with it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built without the network."""

    def build(folder: Path) -> None:
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
        subprocess.run([*command, "--wheel-dir", str(folder), str(ROOT)], check=True)

    return next(_once(tmp_path_factory, "wheel", build).glob("trainkit_torch-*.whl"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of executables of a fresh virtual environment that has the wheel.

    What trainkit depends on is borrowed from this environment by lines in a .pth file. Lines of borrowed .pth files are
    not read, so an editable install of this checkout stays out of sight.
    """

    def install(folder: Path) -> None:
        home = folder / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
        python = home / "bin" / "python"
        site = Path(_ask(python, "import sysconfig; print(sysconfig.get_paths()['purelib'])"))
        borrowed = [path for path in sys.path if path.endswith("site-packages")]
        (site / "borrowed.pth").write_text("".join(f"{path}\n" for path in borrowed))
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--ignore-installed", "--no-index", str(wheel)], check=True)  # not the borrowed one

    return _once(tmp_path_factory, "installed", install) / "venv" / "bin"


@pytest.fixture
def clean_environ() -> dict[str, str]:
    """The environment of someone who has not seen this checkout."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    visible = {name: text for name, text in os.environ.items() if name not in hidden}
    return {name: text for name, text in visible.items() if not name.startswith(("TRAINKIT_", "PYTEST_"))}


def _once(factory: pytest.TempPathFactory, name: str, fill: Callable[[Path], None]) -> Path:
    """Return a folder that the first process of the session fills, and the others wait for."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / f"shared-{name}"
    with (shared / f"shared-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        marker = folder / "done"
        if not marker.exists():
            folder.mkdir(exist_ok=True)
            fill(folder)
            marker.touch()
    return folder


def _ask(python: Path, code: str) -> str:
    return subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.strip()
