"""`trainkit init NAME`: write a package of your own that can train, prove and sweep at once."""

from __future__ import annotations

import importlib.util
import keyword
import os
import shutil
import sys
from pathlib import Path
from typing import Final

from trainkit.config.targets.allowed import ALLOWED_PACKAGES
from trainkit.config.yaml_files import shipped_template
from trainkit.errors import ConfigError, Problem
from trainkit.files import naming
from trainkit.verbs.support.call import Call

_PLACEHOLDER: Final = "own_package"
"""Name of the template's package, which NAME replaces in paths and texts."""
_LONGEST: Final = 100


def run(call: Call) -> int:
    """Write the package into the new folder NAME of the current folder, and print the first commands."""
    name = call.arguments[0]
    problems = [rule for rule in (_name_problem(name), _folder_problem(Path(name))) if rule]
    if problems:
        raise ConfigError([Problem(key="init", value=name, rule=rule, origin="command line") for rule in problems])
    write_package(Path(name))
    flags = f"--config-dir conf --allow-package {name}"
    lines = [
        f"wrote {name}/: model, data, objective, metric, callback, recipe and tests; README.md explains each file",
        f"  cd {name}",
        f"  trainkit {flags} recipe=spirals",
        f"  trainkit prove {flags} recipe=spirals strategy=mirrored strategy.replicas=2 --steps 4",
    ]
    sys.stdout.write("\n".join([*lines, ""]))
    return 0


def write_package(folder: Path) -> None:
    """Write the template into a new folder, whose name becomes that of the package; all files or none.

    Raises:
        StorageError: it cannot be written.
    """
    template = shipped_template()
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    with naming(folder, remedy="Start in a writable folder."):
        partial.mkdir()
        try:
            for file in sorted(template.rglob("*")):
                if file.is_file() and "__pycache__" not in file.parts:
                    target = partial / _renamed(file.relative_to(template).as_posix(), folder.name)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    text = _renamed(file.read_text(encoding="utf-8"), folder.name)
                    target.write_text(text, encoding="utf-8", newline="\n")
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _renamed(text: str, name: str) -> str:
    return text.replace(_PLACEHOLDER, name)


def _name_problem(name: str) -> str | None:
    """Return the reason why a package cannot have this name; None if it can."""
    if not (name.isidentifier() and name.isascii()) or keyword.iskeyword(name) or len(name) > _LONGEST:
        near = "".join(letter if letter.isalnum() and letter.isascii() else "_" for letter in Path(name).name)
        hint = f" For example {near}." if near.isidentifier() and not keyword.iskeyword(near) and near != name else ""
        return f"must be the name of a Python package: ASCII letters, digits and _, {_LONGEST} at most.{hint}"
    own_folders = [path.name for path in shipped_template().iterdir() if path.is_dir() and path.name != _PLACEHOLDER]
    if name in (*own_folders, "outputs"):
        return (
            f"is the name of a folder next to the package ({', '.join(sorted(own_folders))}, outputs). Choose another."
        )
    if name in ALLOWED_PACKAGES or name in sys.stdlib_module_names or _is_installed(name):
        return f"is an existing module, which this package would hide. Choose another, such as my_{name}."
    return None


def _is_installed(name: str) -> bool:
    """Return whether a module of this name can be imported from outside of the current folder."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return True
    if spec is None:
        return False
    paths = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    cwd = Path.cwd()
    return not all(Path(path).absolute().is_relative_to(cwd) for path in paths)


def _folder_problem(folder: Path) -> str | None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        return "a file of this name exists here. Choose another name, or move the file."
    if folder.is_dir() and any(folder.iterdir()):
        return "this folder exists and is not empty. Choose another name, or start in another folder."
    return None
