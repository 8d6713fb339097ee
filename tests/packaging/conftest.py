"""The wheel, built once, and an environment of its own with it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built without the network."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(ROOT)], check=True)
    return next(folder.glob("trainkit-*.whl"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of executables of a fresh virtual environment that has the wheel.

    What trainkit depends on is borrowed from this environment by one line in a .pth file. Lines of borrowed .pth files
    are not read, so an editable install of this checkout stays out of sight.
    """
    home = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    binaries = home / "bin"
    site = Path(_ask(binaries / "python", "import sysconfig; print(sysconfig.get_paths()['purelib'])"))
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(binaries / "python"), "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--no-index", str(wheel)], check=True)
    return binaries


def _ask(python: Path, code: str) -> str:
    return subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def clean_environ() -> dict[str, str]:
    """The environment of someone who has not seen this checkout."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    kept = {name: text for name, text in os.environ.items() if name not in hidden}
    return {name: text for name, text in kept.items() if not name.startswith(("TRAINKIT_", "PYTEST_"))}
