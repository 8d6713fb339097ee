"""Steps of SLURM: the tasks that one srun started, and the lists of nodes and tasks as SLURM writes them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Final

from trainkit.cluster.address import derived_port
from trainkit.cluster.launch import LaunchEnvironment, workers
from trainkit.cluster.variables import Variables

_NAME: Final = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
_RANGE: Final = re.compile(r"(\d+)-(\d+)")
_COUNT: Final = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def node_names(text: str) -> list[str]:
    """Return the names in a list of nodes, in order; numbers keep their leading zeros.

    Raises:
        ValueError: brackets or ranges are invalid.

    Example:
        >>> node_names("n[01-03,7],r[1-2]n[5,6],login")
        ['n01', 'n02', 'n03', 'n7', 'r1n5', 'r1n6', 'r2n5', 'r2n6', 'login']
    """
    names: list[str] = []
    place = 0
    while place < len(text):
        found = _NAME.match(text, place)
        if found is None or text[found.end() : found.end() + 1] not in ("", ","):
            raise ValueError(f"is not a list of nodes: {text}")
        parts = re.split(r"(\[[^\]]*\])", found[0])
        variants = [_variants(part) for part in parts]
        names += map("".join, itertools.product(*variants))
        place = found.end() + 1
    return names


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks of each node, in the order of the nodes.

    Raises:
        ValueError: the text is not such a list.

    Example:
        >>> tasks_per_node("2(x3),1")
        [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        found = _COUNT.fullmatch(part)
        if found is None:
            raise ValueError(f"is not a list of tasks per node: {text}")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _variants(part: str) -> list[str]:
    if not part.startswith("["):
        return [part]
    found: list[str] = []
    for item in part[1:-1].split(","):
        ends = _RANGE.fullmatch(item)
        if ends is None:
            if not item.isdigit():
                raise ValueError(f"is not a list of nodes: {part}")
            found.append(item)
            continue
        found += [f"{number:0{len(ends[1])}d}" for number in range(int(ends[1]), int(ends[2]) + 1)]
    return found


_FIRST_SPECIAL: Final = 0xFFFFFFF0
"""Step ids from here on are not srun's: 0xfffffffb is a batch script, 0xfffffffa the shell of salloc (slurm.h)."""

_SHELLS: Final = ("bash", "sh", "zsh", "fish", "tcsh", "csh", "ksh", "dash")


def step_place(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the rank and size of this process in its step, as written; None outside of a step.

    The script of sbatch and the shell of salloc have the variables of the job, but are not a step. The shell of `srun
    --pty` is a step, but an interactive one: it did not start other tasks of a run.
    """
    step = environ.get("SLURM_STEP_ID", "")
    if not step or int(step) >= _FIRST_SPECIAL or _typed_in(environ):
        return None
    size = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS", "")
    return environ.get("SLURM_PROCID", ""), size


def _typed_in(environ: Mapping[str, str]) -> bool:
    """Return whether this is the shell of `srun --pty`: the first step of a job that is named after the shell.

    Processes that srun or sbatch starts from that shell inherit SLURM_PTY_PORT (seen with SLURM 22.05). If such a step
    were taken for a shell, each of its tasks would silently train alone; a shell taken for a step waits and reports it.
    """
    named = environ.get("SLURM_JOB_NAME", "").rpartition("/")[2] in _SHELLS
    return bool(environ.get("SLURM_PTY_PORT")) and environ.get("SLURM_STEP_ID") == "0" and named


def slurm(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """Return the launch of a task of a step with several tasks.

    The rendezvous is at the first node of the step, where rank 0 is, at a port derived from the ids of job and step,
    unless MASTER_ADDR and MASTER_PORT are set.

    Source: https://slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT VARIABLES".
    """
    place = step_place(environ)
    if place is None or place[1] == "1":
        return None
    read = Variables(environ, because="SLURM_STEP_ID")
    size_name = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    rank, size = read.rank_of("SLURM_PROCID", size_name)
    local_rank, node = read.number("SLURM_LOCALID"), read.number("SLURM_NODEID", default=0)
    nodes = _nodes(read)
    counts = _counts(read)
    job = f"slurm {read.text('SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']}"
    alone = len(nodes) == 1
    num_local = counts[node] if node < len(counts) else (size if alone else local_rank + 1)
    if not read.problems and local_rank >= num_local:
        read.report("SLURM_LOCALID", f"must be less than the {num_local} tasks of its node.")
    store = read.store("127.0.0.1" if alone else nodes[0], derived_port(job))
    attempt = read.number("SLURM_RESTART_COUNT", default=0)
    read.finish()
    return LaunchEnvironment(
        kind="SLURM",
        tasks=workers(size),
        rank=rank,
        local_rank=local_rank,
        num_local=num_local,
        num_hosts=len(nodes),
        store=store,
        hosts_store=rank == 0,
        attempt=attempt,
        name=job.replace(" ", "-"),
        addresses=_places(nodes, counts, size, environ.get("SLURM_DISTRIBUTION", "block")),
    )


def _nodes(read: Variables) -> list[str]:
    try:
        return node_names(read.text("SLURM_STEP_NODELIST")) or [""]
    except ValueError as error:
        read.report("SLURM_STEP_NODELIST", f"{error}.", show_value=False)
        return [""]


def _counts(read: Variables) -> list[int]:
    text = read.text("SLURM_STEP_TASKS_PER_NODE")
    try:
        return tasks_per_node(text) if text else []
    except ValueError as error:
        read.report("SLURM_STEP_TASKS_PER_NODE", f"{error}.", show_value=False)
        return []


def _places(nodes: list[str], counts: list[int], size: int, distribution: str) -> tuple[str, ...]:
    """Return the node of every rank if ranks fill node after node; otherwise an empty tuple."""
    if len(counts) != len(nodes) or sum(counts) != size:
        return ()
    if max(counts) > 1 and len(nodes) > 1 and distribution.partition(":")[0] not in ("block", "pack"):
        return ()
    return tuple(node for node, count in zip(nodes, counts, strict=True) for _ in range(count))
