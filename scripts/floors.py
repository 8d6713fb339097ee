"""Test the lowest and the newest versions that pyproject.toml allows: the fast lane, and the contract of strategies.

python scripts/floors.py [lowest] [newest] [prerelease] [--folder FOLDER]

Each resolution gets its own virtual environment: direct dependencies, including those of the extra `test`, at their
lowest (or newest) allowed versions, and indirect ones as new as possible. `prerelease` is the newest with pre-releases
of Hydra and OmegaConf, which pyproject.toml does not allow yet. Exits with 1 if a test fails on one. `uv`
resolves: the one on PATH, or else one that pip installs for this run. Its variables apply: without need of a CUDA build
of PyTorch, UV_TORCH_BACKEND=cpu uses the index of the CPU builds (a CUDA build downloads 3 GB).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
STRATEGIES: Final = {"lowest": "lowest-direct", "newest": "highest", "prerelease": "highest"}
LANES: Final = (["--fast"], ["tests/contract/test_strategies.py", "tests/contract/test_shaping.py"])
"""Arguments of pytest: the fast lane trains in one process, and hardly compiles."""

TOLERATED: Final = [
    "-Wignore:The version_base parameter is deprecated",
    "-Wignore:register_new_resolver",
]
"""What tests do as users of Hydra 1.3 do, and a later Hydra warns about."""


def run(*command: str | Path) -> None:
    """Run a command; show its output only if it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}\n{' '.join(map(str, command))}: exit code {done.returncode}")


def find_uv(folder: Path) -> Path:
    """Return the uv on PATH, or install one in a virtual environment of this run."""
    path = shutil.which("uv")
    if path is not None:
        return Path(path)
    run(sys.executable, "-m", "venv", folder / "uv")
    run(folder / "uv" / "bin" / "pip", "install", "--quiet", "uv")
    return folder / "uv" / "bin" / "uv"


def direct_names() -> list[str]:
    """Return the names of the packages that pyproject.toml itself requires for the tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *extras["test"]]
    for group in [name for name in requirements if name.startswith("trainkit-torch[")]:
        requirements += [name for extra in group[len("trainkit-torch[") : -1].split(",") for name in extras[extra]]
    return sorted({re.split(r"[^\w-]", requirement)[0] for requirement in requirements} - {"trainkit-torch"})


def install(uv: Path, resolution: str, folder: Path) -> Path:
    """Create the environment of a resolution; return its Python."""
    pins, python = folder / f"{resolution}.txt", folder / resolution / "bin" / "python"
    options = ["--quiet", "--python", sys.executable]
    chosen: list[str | Path] = ["--resolution", STRATEGIES[resolution], "--extra", "test", "--output-file", pins]
    run(uv, "pip", "compile", "--upgrade", *options, *chosen, "pyproject.toml")
    if not python.exists():
        run(uv, "venv", *options, folder / resolution)
    run(uv, "pip", "sync", "--quiet", "--python", python, pins)
    run(uv, "pip", "install", "--quiet", "--python", python, "--no-deps", "--editable", ".")
    if resolution == "prerelease":
        early = ("--prerelease=allow", "--upgrade", "--no-deps", "hydra-core", "omegaconf")
        run(uv, "pip", "install", "--quiet", "--python", python, *early)
    freeze: list[str | Path] = [uv, "pip", "freeze", "--python", python]
    installed = subprocess.run(freeze, capture_output=True, text=True, check=True).stdout
    versions = dict(re.findall(r"^([\w.-]+)==(\S+)", installed, re.MULTILINE))
    print(f"{resolution}: {', '.join(f'{name} {versions[name]}' for name in direct_names())}", flush=True)
    return python


def main(arguments: Sequence[str]) -> int:
    """Test each resolution that is named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("resolutions", nargs="*", help=f"{', '.join(STRATEGIES)}; all where none is named")
    parser.add_argument("--folder", type=Path, help="where the environments are made, and kept")
    options = parser.parse_args(arguments)
    unknown = set(options.resolutions) - set(STRATEGIES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(STRATEGIES)}")
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        uv = find_uv(folder)
        for resolution in options.resolutions or STRATEGIES:
            python, start = install(uv, resolution, folder), time.monotonic()
            environment = os.environ | {"VIRTUAL_ENV": str(python.parents[1])}
            tests: list[str | Path] = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE", *TOLERATED]
            runs = [subprocess.run([*tests, *lane], cwd=ROOT, env=environment, check=False) for lane in LANES]
            codes = [run.returncode for run in runs]
            print(f"{resolution}: exit codes {codes} after {time.monotonic() - start:.0f} s", flush=True)
            failed += [resolution] * any(codes)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
