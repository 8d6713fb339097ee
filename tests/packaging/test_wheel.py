"""What is inside the wheel, and that it works where nothing else of ours is."""

import json
import subprocess
import zipfile
from pathlib import Path

from tests.packaging.conftest import ROOT


def run(binaries: Path, *arguments: str, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [str(binaries / "trainkit"), *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_the_wheel_carries_configs_recipes_data_and_type_marker(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = {
        f"trainkit/{path.relative_to(ROOT)}" for kind in ("conf", "recipes") for path in (ROOT / kind).rglob("*.*")
    }
    assert not shipped - names
    assert [name for name in names if name.startswith("trainkit/docs/")] == ["trainkit/docs/errors.md"]
    assert {"trainkit/py.typed", "trainkit/data/digits.npz", "trainkit/data/digits.LICENSE"} <= names
    assert {f"trainkit/report/web/static/{name}" for name in ("uPlot.iife.min.js", "uPlot.LICENSE", "run.js")} <= names
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)


def test_the_wheel_carries_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    version = "trainkit_torch-0.1.0.dist-info"
    assert {name.partition("/")[0] for name in names} == {"trainkit", "hydra_plugins", version}
    assert "hydra_plugins/__init__.py" not in names
    assert not [name for name in names if "__pycache__" in name]


def test_an_installed_wheel_trains_from_an_empty_folder(
    installed: Path, cwd: Path, clean_environ: dict[str, str]
) -> None:
    done = run(installed, "steps=30", "hydra.run.dir=out", cwd=cwd, env=clean_environ)
    assert done.returncode == 0, done.stderr
    assert json.loads((cwd / "out" / "result.json").read_text())["steps"] == 30
    assert sorted(path.name for path in cwd.iterdir()) == ["out"]


def test_an_installed_wheel_contains_every_recipe_and_choice(
    installed: Path, cwd: Path, clean_environ: dict[str, str]
) -> None:
    listed = run(installed, "ls", cwd=cwd, env=clean_environ).stdout
    recipes = [path.name for path in (ROOT / "recipes").iterdir() if path.is_dir()]
    choices = [path.stem for path in (ROOT / "conf").glob("*/*.yaml")]
    assert [name for name in [*recipes, *choices] if name not in listed] == []
    assert run(installed, "explain", "errors.model", cwd=cwd, env=clean_environ).stdout.startswith("Model\n\nCause: ")
    assert list(cwd.iterdir()) == []
