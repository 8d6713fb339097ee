"""`trainkit replay RUN`: train a run again from its own record, and compare weights and metrics bit for bit."""

from __future__ import annotations

import platform
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainkit.config.grammar import refusal
from trainkit.config.targets.allowed import importable
from trainkit.config.values import MOST_PROCESSES
from trainkit.errors import UnreadableError
from trainkit.files import parse_json, read_bytes, read_lines, read_map
from trainkit.report.schemas.looking import FirstDifference, Replay
from trainkit.verbs.support.call import Call

if TYPE_CHECKING:
    from trainkit.config.schema import RunConfig

_CLOCKED: Final = frozenset(
    {"seconds", "samples_per_s", "targets_per_s", "data_wait", "mfu", "memory", "memory_peak", "launches"}
)
"""Figures of a row that depend on the time or on the process."""
_RESULT: Final = {"weights_sha256": str, "steps": int, "status": str}
Rows = Mapping[tuple[int, int], Mapping[str, Any]]
"""Metrics by (step, step of the row before; -1 for an evaluation)."""


def run(call: Call) -> int:
    """Replay a run; return 0 for the same bits, 1 for others."""
    from trainkit.api import train  # noqa: PLC0415 - nothing is imported to refuse an argument
    from trainkit.config.identity import run_config  # noqa: PLC0415 - the same
    from trainkit.config.schema import NO_RUN  # noqa: PLC0415
    from trainkit.config.sections import SweepConfig  # noqa: PLC0415
    from trainkit.config.targets.build import class_built_by  # noqa: PLC0415
    from trainkit.trainer.time_limit import RECORD  # noqa: PLC0415

    folder = Path(call.arguments[0]).expanduser()
    if not (folder / "resolved.yaml").is_file():
        raise refusal(str(folder), NO_RUN)
    try:
        result = read_map(folder / "result.json", _RESULT)
    except UnreadableError as error:
        rule = f"has no result with the hash of its weights: {error.reason}. A run must end, or be stopped by Ctrl-C, "
        raise refusal(str(folder), f"{rule}first.") from None
    code = [path for path in [folder / "code"] if path.is_dir()]  # the sources that the run has saved
    packages = sorted({path.stem for src in code for path in src.iterdir() if path.is_dir() or path.suffix == ".py"})
    with importable(code, first=True), _threads_of(folder):
        cfg = run_config(folder)
        if result.get("own_loss"):
            raise refusal(str(folder), "has losses of its own loop (trainkit.session). Run its script again.")
        if cfg.changes:
            rule = f"was changed while it trained, and no single config repeats it: {cfg.changes[0]}."
            raise refusal(str(folder), rule)
        acting = {
            name: node
            for name, node in cfg.callbacks.items()
            if name == "progress" or not getattr(class_built_by(node), "observes", False)
        }
        quiet = "json" in call.flags
        steps = result["steps"]
        again = replace(
            cfg,
            resume=None,
            stop_at_step=None if cfg.steps is not None and steps >= cfg.steps else steps,
            stop_after_record=None if cfg.stop_after is None else str(folder / RECORD),
            callbacks=acting,
            logger={},
            sweep=SweepConfig(),
            report_page=False,
            quiet=quiet,
        )
        differing = list(_differences(folder, again))
        if not quiet:
            sys.stdout.writelines(f"differs here: {text}\n" for text in differing)
        done = train(again, run_dir=call.flags.get("out"), packages=[*call.packages, *packages])
    if done.get("steps") != steps or done.get("weights_sha256") is None:
        sys.stderr.write(f"the replay ended after {done.get('steps')} of {steps} steps: {done.get('reason')}\n")
        return int(done.get("exit_code") or 1)
    recorded, replayed = rows_of(folder), rows_of(Path(done["folder"]))
    first = first_difference(recorded, replayed)
    same = first is None and done["weights_sha256"] == result["weights_sha256"]
    document: Replay = {
        "version": 1,
        "run": str(folder),
        "folder": str(done["folder"]),
        "same": same,
        "steps": steps,
        "rows": len(recorded.keys() & replayed.keys()),
        "weights_sha256": result["weights_sha256"],
        "replayed_sha256": done["weights_sha256"],
        "first": first,
        "differing": differing,
    }
    call.show(document, _lines(document))
    return int(not same)


@contextmanager
def _threads_of(folder: Path) -> Iterator[None]:
    """Compute with the threads of torch that a run had: a job of a sweep has a share of the cores."""
    import torch  # noqa: PLC0415 - nothing is imported to refuse an argument

    before, threads = torch.get_num_threads(), None
    with suppress(UnreadableError):
        threads = read_map(folder / "environment.json", {"devices": dict})["devices"].get("threads")
    torch.set_num_threads(threads if isinstance(threads, int) and 0 < threads <= MOST_PROCESSES else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _differences(folder: Path, cfg: RunConfig) -> Iterator[str]:
    """Yield what differs between the place where a run was trained and this one."""
    from trainkit.run.begin import devices, git_state, packages  # noqa: PLC0415 - imports torch

    try:
        facts = read_map(folder / "environment.json", {"packages": dict, "devices": dict, "host": str, "python": str})
    except UnreadableError as error:
        yield f"where it was trained is not known: {error}"
        return
    system = {"host": socket.gethostname(), "system": platform.platform(), "python": platform.python_version()}
    current = {**system, **packages(cfg.to_dict()), **devices()}
    before = {**{name: facts.get(name) for name in system}, **facts["packages"], **facts["devices"]}
    for name, value in before.items():
        if value != current.get(name):
            yield f"{name} was {value}, and is {current.get(name)}"
    states = [{} if state is None else state for state in (facts.get("git"), git_state())]
    if states[0].get("commit") != states[1].get("commit"):
        yield f"sources: commit was {states[0].get('commit')}, and is {states[1].get('commit')}"
    elif any(state.get("dirty") for state in states):
        yield "sources: tracked files of this folder are, or were, changed since their commit"
    for path in sorted((folder / "code").rglob("*.py")):
        other = Path(path.relative_to(folder / "code"))
        if other.is_file() and read_bytes(other, follow=True) != read_bytes(path):
            yield f"sources: {other} has changed; the copy in the run is used"


def rows_of(folder: Path) -> Rows:
    """Return the rows of `metrics.jsonl`; of a step that was logged again, the last one."""
    rows: dict[tuple[int, int], Mapping[str, Any]] = {}
    last = 0
    with suppress(UnreadableError, OSError, ValueError, KeyError, TypeError):  # the weights decide
        for line in read_lines(folder / "metrics.jsonl"):
            row = parse_json(line)
            step, is_evaluation = int(row["step"]), "samples" not in row
            rows[step, -1 if is_evaluation else last] = {**rows.get((step, -1), {}), **row} if is_evaluation else row
            last = last if is_evaluation else step
    return rows


def first_difference(recorded: Rows, replayed: Rows) -> FirstDifference | None:
    """Return the first metric that differs in rows about the same steps; figures of time and memory do not count.

    Example:
        >>> first_difference({(10, 0): {"train/loss": 0.5, "seconds": 1.0}}, {(10, 0): {"train/loss": 0.25}})
        {'step': 10, 'name': 'train/loss', 'recorded': 0.5, 'replayed': 0.25}
    """
    for key in sorted(recorded.keys() & replayed.keys()):
        left, right = recorded[key], replayed[key]
        for name in (name for name in left if name in right and name not in _CLOCKED):
            if left[name] != right[name] and not name.startswith(("phase/", "gpu/")):
                return {"step": key[0], "name": name, "recorded": left[name], "replayed": right[name]}
    return None


def _lines(document: Replay) -> Iterator[str]:
    steps = f"{document['steps']:,} step{'' if document['steps'] == 1 else 's'}"
    if document["same"]:
        yield f"the same bits: {steps}, {document['rows']} rows of metrics, weights {document['weights_sha256'][:12]}"
        return
    if (first := document["first"]) is None:
        yield f"differs: in the weights after {steps}; {document['rows']} rows of metrics are equal"
    else:
        values = f"{first['recorded']} was recorded, and is {first['replayed']}"
        yield f"differs: first at step {first['step']} in {first['name']}: {values}"
    yield f"  weights {document['weights_sha256'][:12]} were recorded, and are {document['replayed_sha256'][:12]}"
    if not document["differing"]:
        yield "  nothing else is known to differ: numerics.reproducible=true repeats its bits on any placement"
