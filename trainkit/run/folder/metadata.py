"""The initial files of a run, `resolved.yaml` and `environment.json`, and the environment variables of its workers."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from trainkit.cluster.tasks import Identity
from trainkit.config.paths import config_dir_environ
from trainkit.config.schema import RunConfig
from trainkit.config.secrets import redacted
from trainkit.config.targets.allowed import package_environ
from trainkit.redaction import mask, redacted_argument
from trainkit.run.folder.run_folder import RunFolder, write_atomically, write_json_atomically

_OURS: Final = ("trainkit", "torch", "numpy", "safetensors", "hydra-core", "omegaconf")
_GIT_TIMEOUT_S: Final = 2.0


def write_resolved(folder: RunFolder, cfg: RunConfig) -> dict[str, Any]:
    """Write the config with every value resolved, as plain YAML.

    Returns:
        The secrets that were left out, by full key: the workers need them.
    """
    import yaml  # noqa: PLC0415 - 20 ms that a worker does not need here

    values, secrets = redacted(cfg.to_dict())
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text = yaml.dump(values, Dumper=dumper, sort_keys=False, allow_unicode=True, width=110)
    write_atomically(folder.resolved, text)
    return secrets


def write_environment(
    folder: RunFolder, *, cfg: RunConfig, fingerprint: str, notes: Sequence[str] = (), argv: Sequence[str] | None = None
) -> None:
    """Write `environment.json`: host, commit, packages, devices, command, seed, fingerprint.

    Costs about 10 ms, a third of it git.
    """
    write_json_atomically(
        folder.environment,
        {
            "started": datetime.now().astimezone().isoformat(timespec="seconds"),
            "argv": [redacted_argument(argument) for argument in (sys.argv if argv is None else argv)],
            "cwd": os.getcwd(),  # noqa: PTH109 - a string is needed
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "git": git_state(),
            "packages": packages(cfg.to_dict()),
            "devices": _devices(),
            "seed": cfg.seed,
            "fingerprint": fingerprint,
            "notes": [mask(note) for note in notes],
        },
    )


def git_state() -> dict[str, Any] | None:
    """Return commit, branch and whether tracked files of the current folder are changed; None outside a repository."""
    command = ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        answer = subprocess.run(  # noqa: S603 - a fixed command
            command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):  # no git, no repository, or one too large for the time limit
        return None
    lines = answer.splitlines()
    facts = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# branch."))
    return {
        "commit": facts.get("branch.oid"),
        "branch": facts.get("branch.head"),
        "dirty": any(not line.startswith("#") for line in lines),
    }


def packages(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of the packages that every run uses, and of the packages of its `_target_`s."""
    modules = {target.partition(".")[0] for target in _targets(values)}
    found = {}
    for name in dict.fromkeys((*_OURS, *sorted(modules))):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # a folder on the path, or a module of another name
            continue
    return found


def _targets(values: Any) -> Iterator[str]:
    if isinstance(values, Mapping):
        if isinstance(values.get("_target_"), str):
            yield values["_target_"]
        for value in values.values():
            yield from _targets(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _targets(value)


def _devices() -> dict[str, Any]:
    """Return cores and GPUs; queries the driver only for their number, which creates no CUDA context."""
    import torch  # noqa: PLC0415 - a process that starts a run has imported it

    count = torch.cuda.device_count()
    return {
        "cores": num_cores(),
        "cuda": torch.version.cuda,
        "gpus": count,
    }


def worker_environ(environ: Mapping[str, str], identity: Identity) -> dict[str, str]:
    """Return the environment of a worker: its identity, the packages allowed for targets, threads and network.

    Example:
        >>> worker_environ({"OMP_NUM_THREADS": "3"}, Identity.solo())["OMP_NUM_THREADS"]
        '3'
    """
    defaults = {
        "OMP_NUM_THREADS": str(max(1, num_cores() // identity.num_ranks)),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    if identity.task.rank > 0:
        defaults["PYTHONUNBUFFERED"] = "1"  # a rank that is killed keeps its log
    if sys.platform == "win32":
        del defaults["GLOO_SOCKET_IFNAME"]
    return {**defaults, **environ, **package_environ(), **config_dir_environ(), **identity.to_environ()}


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(own_cores())


def own_cores() -> list[int]:
    """Return the cores that this process may use: all, unless its launcher restricts them."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def threads_of(own: Mapping[str, Any], places: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of threads of a process that shares its cores with other processes of its launch.

    SLURM and mpirun may bind each process to its own cores; torchrun gives all cores to all processes.

    Example:
        >>> bound = [{"host": "a", "cores": [0, 1]}, {"host": "a", "cores": [2, 3]}, {"host": "b", "cores": [0, 1]}]
        >>> free = [{"host": "a", "cores": [0, 1, 2, 3]}, {"host": "a", "cores": [0, 1, 2, 3]}]
        >>> threads_of(bound[0], bound), threads_of(free[0], free)
        (2, 2)
    """
    sharing = [one for one in places if one["host"] == own["host"] and not set(own["cores"]).isdisjoint(one["cores"])]
    return max(1, len(own["cores"]) // len(sharing))
