"""What decides the weights of a training besides its seed, as hashes: equal states are one training, without a run.

state.json    in the folder of the runs of a side of `trainkit compare`, written before they start
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from trainkit.cluster.host import count_gpus, num_cores
from trainkit.config.identity import fingerprint, maths_keys
from trainkit.config.schema import RunConfig
from trainkit.config.targets.allowed import root_of, targets_in
from trainkit.errors import UnreadableError
from trainkit.files import read_map, read_text, write_atomically

FILE: Final = "state.json"
_LIMIT: Final = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """SHA-256 of each part of a state."""

    version: int = 1
    """Version of the file."""
    config: str
    """Every key that can change the result, with the sizes of a planned step, without the seed."""
    sources: str
    """Syntax trees of the packages that the config names and that are not installed; the files of trainkit, if it is
    not."""
    data: str
    """Name, size and time of change of the files that the config names."""
    packages: str
    """Versions of Python and of all installed packages."""
    machine: str
    """Host, cores, GPUs, and threads."""

    @property
    def sha256(self) -> str:
        """The hash of all parts."""
        return _hash(json.dumps(asdict(self), sort_keys=True))

    def differing(self, other: State) -> list[str]:
        """Return the parts that are not equal.

        Example:
            >>> state = State(config="a", sources="b", data="c", packages="d", machine="e")
            >>> state.differing(replace(state, data="f"))
            ['data']
        """
        return [name for name, value in asdict(self).items() if value != getattr(other, name)]


def state_of(cfg: RunConfig) -> State:
    """Return the state of a planned training, as it would start now.

    Args:
        cfg: the config of a plan: the sizes of its step are part of its fingerprint.
    """
    versions = sorted(f"{package.name} {package.version}" for package in importlib.metadata.distributions())
    threads = [os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")]
    machine = [platform.node(), num_cores(), count_gpus(), cfg.sweep.slots, cfg.sweep.jobs_per_device, *threads]
    paths = [value for value in maths_keys(cfg).values() if isinstance(value, str)]
    roots = {root_of(target) for _, target in targets_in(cfg.to_dict()) if isinstance(target, str)}
    return State(
        config=fingerprint(replace(cfg, seed=0)),
        sources=_hash("\n".join(_trees(sorted({*roots, "trainkit"})))),
        data=_hash("\n".join(_stats(paths))),
        packages=_hash("\n".join([platform.python_version(), *versions])),
        machine=_hash(json.dumps(machine)),
    )


def read_state(folder: Path) -> State | None:
    """Return the state that a folder records; None if it records none."""
    with suppress(UnreadableError, TypeError):
        return State(**read_map(folder / FILE, {"config": str}, limit=_LIMIT))
    return None


def write_state(folder: Path, state: State) -> None:
    """Record the state of the runs of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / FILE, json.dumps(asdict(state), indent=2) + "\n")


def forget_state(folder: Path) -> None:
    """Remove the state of a folder: what decides its runs changed while they trained."""
    (folder / FILE).unlink(missing_ok=True)


def _trees(roots: Iterable[str]) -> Iterator[str]:
    """Yield name and syntax tree of each file of the packages that are not installed."""
    stdlib = Path(sysconfig.get_path("stdlib")).resolve()
    for root in roots:
        spec = None
        with suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(root)
        if spec is None or spec.origin in (None, "built-in", "frozen"):
            continue
        file = Path(str(spec.origin)).resolve()
        # By name: an environment may see packages of the system or of the user, whose folders it does not list.
        if file.is_relative_to(stdlib) or not {"site-packages", "dist-packages"}.isdisjoint(file.parts):
            continue  # its version stands for it
        is_package = bool(spec.submodule_search_locations)
        for path in sorted(file.parent.rglob("*.py") if is_package else file.parent.glob("*.py")):
            try:
                content = read_text(path, follow=True)
                tree = _hash(content) if root == "trainkit" else ast.dump(ast.parse(content))
            except (UnreadableError, SyntaxError, ValueError):  # no source of Python in UTF-8
                tree = "\n".join(_stats([str(path)]))
            yield f"{path.relative_to(file.parent)} {tree}"


def _stats(paths: Iterable[str]) -> Iterator[str]:
    """Yield name, size and time of change of each file at or below some paths; texts that are no path have none."""
    for text in paths:
        with suppress(OSError, ValueError):
            path = Path(text).expanduser()
            for file in sorted(item for item in (path, *path.rglob("*")) if item.is_file()):
                about = file.stat()
                yield f"{file} {about.st_size} {about.st_mtime_ns}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
