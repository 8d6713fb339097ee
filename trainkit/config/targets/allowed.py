"""Which packages a `_target_` may name, decided by its text alone: nothing is imported here.

Six packages may be named in every run, for classes and builders of known kinds (`trainkit.config.targets.kinds`). The
user who starts the process must allow every other package: `--allow-package` on the command line, `packages=` from
Python, and `TRAINKIT_ALLOW_PACKAGES` for the workers that such a process starts. A run folder cannot allow a package.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from trainkit.config.interface import trusting
from trainkit.errors import ConfigError, Problem
from trainkit.names import rule_of

TARGET: Final = "_target_"
ALLOWED_PACKAGES: Final = ("trainkit", "torch", "torchvision", "timm", "transformers", "torchmetrics")
"""Packages that a `_target_` may name without being allowed on the command line."""
IN_PROCESS: Final = "python_objects"
"""The module that holds the objects given to `trainkit.train`, in the process of the call alone."""
VARIABLE: Final = "TRAINKIT_ALLOW_PACKAGES"
"""The environment variable that passes the allowed packages to a worker, separated by commas."""
DATA_HOOKS: Final = ("collate", "batch_transform", "sampler")
"""Keys of `data` that name a function or class: a node with `_target_`, or the dotted name alone."""
_SESSION_RULE: Final = "was an object of a Python session. Give it to trainkit.train again, with 'resume=RUN'."

_TORCH: Final = ("torch.nn", "torch.optim", "torch.utils.data")
_OPENED: Final[Counter[str]] = Counter()
"""Package -> number of open blocks in this process that allow it."""


@contextmanager
def allow_packages(packages: Sequence[str]) -> Iterator[None]:
    """Allow targets of these packages in this process while the block runs.

    Args:
        packages: names given by the user who starts the process, never by a file of a run.

    Raises:
        ConfigError: a package is not installed, or is one of the six that need no flag.

    Example:
        >>> with allow_packages(["fractions"]):
        ...     allowed_packages()[-1]
        'fractions'
    """
    refuse_packages(packages)
    _OPENED.update(packages)
    try:
        yield
    finally:
        _OPENED.subtract(packages)


@contextmanager
def importable(folders: Sequence[Path], *, first: bool = False) -> Iterator[None]:
    """Let this process, and those that it starts, import modules from these folders while the block runs: after all
    others, or before them.
    """
    before, variable = [*sys.path], os.environ.get("PYTHONPATH")
    names, inherited = [str(folder.absolute()) for folder in folders], [*filter(None, [variable])]
    if names:
        sys.path[:] = [*names, *before] if first else [*before, *names]
        os.environ["PYTHONPATH"] = os.pathsep.join([*names, *inherited] if first else [*inherited, *names])
    try:
        yield
    finally:
        if names:
            sys.path[:] = before
            os.environ.pop("PYTHONPATH")
            os.environ.update({} if variable is None else {"PYTHONPATH": variable})


def allowed_packages() -> tuple[str, ...]:
    """Return the packages that targets may come from in this process."""
    return (*ALLOWED_PACKAGES, *_opened())


def package_environ() -> dict[str, str]:
    """Return the variables that allow a worker the packages allowed here."""
    opened = _opened()
    return {VARIABLE: ",".join(opened)} if opened else {}


def package_arguments(packages: Sequence[str] | None = None) -> list[str]:
    """Return the arguments that allow packages in a command printed by trainkit.

    Args:
        packages: the packages; None for the packages that this process allows in addition to the six.

    Example:
        >>> package_arguments(["mine", "ours"]), package_arguments([])
        (['--allow-package', 'mine,ours'], [])
    """
    names = _opened() if packages is None else tuple(packages)
    return ["--allow-package", ",".join(names)] if names else []


def _opened() -> tuple[str, ...]:
    return tuple(name for name, count in _OPENED.items() if count > 0)


def packages_from(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the packages that the parent process allows.

    Example:
        >>> packages_from({"TRAINKIT_ALLOW_PACKAGES": "mine,ours"}), packages_from({})
        (('mine', 'ours'), ())
    """
    return tuple(name for name in environ.get(VARIABLE, "").split(",") if name)


def own_code() -> str:
    """Return the remedy for targets that no config may name."""
    return f"To use it, call it in a class or function of your own, and allow its package: {trusting('NAME')}."


def refuse_packages(packages: Sequence[str]) -> None:
    """Refuse packages that cannot be allowed.

    Raises:
        ConfigError: every such package, with the remedy.
    """
    refused = [(name, rule) for name in dict.fromkeys(packages) if (rule := _package_problem(name))]
    if refused:
        raise ConfigError([Problem(key=trusting(name), rule=rule) for name, rule in refused])


def _package_problem(name: str) -> str | None:
    if name in ALLOWED_PACKAGES:
        return (
            "needs no flag for its classes of known kinds, and no flag allows the rest of it. To use one of its "
            "functions, call it in a class or function of your own, and allow your package."
        )
    root = root_of(name)
    if root != name and root.isidentifier():
        return f"must be only the first part of the module's name: {trusting(root)}."
    if not name.isidentifier():
        return "must be the name of a package: letters, digits and _ only."
    if not _is_importable(name):
        return "there is no such package. Install it, or start trainkit in the folder that holds it."
    return None


def _is_importable(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def root_of(path: str) -> str:
    """Return the first component of a dotted path, its package.

    Example:
        >>> root_of("torch.nn.Linear")
        'torch'
    """
    return path.partition(".")[0]


def targets_in(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every `_target_` and dotted name of `data` below a value, also in lists, with its path.

    Example:
        >>> list(targets_in({"inner": [{"_target_": "a.B"}]}))
        [(('inner', '0', '_target_'), 'a.B')]
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            if name == TARGET or (path == ("data",) and name in DATA_HOOKS and isinstance(item, str) and "." in item):
                yield (*path, str(name)), item
            yield from targets_in(item, (*path, str(name)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from targets_in(item, (*path, str(index)))


def name_problem(target: Any, allowed: Sequence[str]) -> str | None:
    """Return what is wrong with a target by its text alone; None where its module may be imported.

    Example:
        >>> name_problem("torch.nn.Linear", ALLOWED_PACKAGES)
    """
    if not isinstance(target, str) or "." not in target or not all(map(str.isidentifier, target.split("."))):
        return "must name a class or function with its module, package.module.Name."
    package, *parts = target.split(".")
    if package not in allowed:
        rule = f"{package} is not among the packages that targets may come from ({', '.join(allowed)})."
        return _SESSION_RULE if package == IN_PROCESS else f"{rule} To trust it: {trusting(package)}."
    if package == "trainkit" or package not in ALLOWED_PACKAGES:
        return rule_of(target)
    private = next((part for part in parts if part.startswith("_")), None)
    if private is not None:
        return f"{private} is private to {package}. {own_code()}"
    if package == "torch" and not target.startswith(tuple(f"{home}." for home in _TORCH)):
        return f"of torch, targets may come from {', '.join(_TORCH[:-1])} and {_TORCH[-1]} only. {own_code()}"
    return _shadow_problem(package)


def _shadow_problem(package: str) -> str | None:
    """Return the problem of a local folder that hides a package which is not installed: anyone may own it."""
    if package == "torch" or package in sys.modules:
        return None
    spec = importlib.util.find_spec(package)
    paths = [] if spec is None else [Path(path) for path in spec.submodule_search_locations or [spec.origin or "."]]
    if any(path.absolute().parent == Path.cwd() for path in paths):
        return f"{package} is not installed, and the folder {package} here is not imported in its place."
    return None
