"""The trust strip of a run's page: facts that support the figures of a run, and facts that do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from trainkit.config.schema import RunConfig
from trainkit.numerics.batch import AT_EQUAL_CUT, CUT_UNKNOWN
from trainkit.report.numbers import count
from trainkit.report.web.page import printable
from trainkit.report.web.run_files import RunFiles

_CUTS: Final = {
    AT_EQUAL_CUT: ("to rounding, at an equal batch.micro_size", ""),
    CUT_UNKNOWN: ("to rounding, on as many replicas", " On another number it may be another training."),
}
"""Part of a note of the run -> agreement of its repetition, and a sentence to add to the note."""


def trust_strip(files: RunFiles, cfg: RunConfig | None, *, state: str) -> list[dict[str, Any]]:
    """Return the items of the strip: name, value, detail, and `good` (None: neither good nor bad)."""
    return [
        {"name": name, "value": printable(value, 80), "detail": printable(detail), "good": good}
        for name, value, detail, good in _items(files, cfg, state)
    ]


def _items(files: RunFiles, cfg: RunConfig | None, state: str) -> Iterator[tuple[str, str, str, bool | None]]:
    result = files.result
    fingerprint = str(result.get("fingerprint") or files.environment.get("fingerprint") or "")
    yield "fingerprint", fingerprint[:12] or "unknown", fingerprint, None
    weights = str(result.get("weights_sha256") or "")
    yield "weights (SHA-256)", weights[:12] or "not yet", weights or "hashed at the end of a run", None
    yield ("reproducible", *_reproducible(files, cfg))
    yield ("last proof", *_proof(files))
    yield ("restarts", *_restarts(files))
    if files.rollbacks is not None:
        yield ("rollbacks", *_rollbacks(files.rollbacks))
    yield ("samples repeated or skipped", *_samples(files, ended=bool(result) and state not in ("starting", "running")))


def _reproducible(files: RunFiles, cfg: RunConfig | None) -> tuple[str, str, bool | None]:
    """Return whether a repetition of the command gives the same bits, even on other replicas, or the reason if not."""
    if cfg is None:
        return "unknown", "resolved.yaml cannot be read", None
    git = files.environment.get("git") or {}
    if git.get("dirty"):
        return "no", "the code had changes that no commit holds", False
    timing = _timing(cfg.strategy)
    if timing is not None:
        return "no", f"{timing}: another training every time", False
    if cfg.numerics.reproducible:
        return "to the bit", "numerics.reproducible=true: sums have one order on any number of replicas", True
    for words, (value, more) in _CUTS.items():
        for note in _notes(files.environment):
            if words in note:
                return value, f"{note}{more}", None
    detail = "numerics.reproducible=false: another number of processes, threads or devices rounds differently"
    return "to rounding", detail, None


def _timing(strategy: Mapping[str, Any]) -> str | None:
    """Return the reason why the updates of a run depend on the speed of processes or threads; None if they do not."""
    alone = strategy.get("workers") == 1 or len(strategy.get("compute_devices") or "ab") == 1
    if strategy.get("mode") == "async" and strategy.get("replay") is None and not alone:
        return "strategy.mode=async applies gradients as they arrive"
    if strategy.get("spare_mode") == "replace" and strategy.get("spare_replicas"):
        return "strategy.spare_mode=replace makes a step of the first shards that arrive"
    return None


def _notes(environment: Mapping[str, Any]) -> list[str]:
    """Return the notes of the command that began the run, and of the last one that continued it."""
    commands = (environment.get("begun") or {}, environment)
    return [note for one in commands for note in one.get("notes") or () if isinstance(note, str)]


def _proof(files: RunFiles) -> tuple[str, str, bool | None]:
    """Return the last proof of this training on this placement."""
    if not files.result:
        return "not yet", "looked up at the end of a run", None
    proved = files.result.get("proved")
    if not isinstance(proved, dict):
        return "none", "trainkit prove, with the arguments of this run, compares it with one device", None
    same, numbers = proved.get("same_training"), str(proved.get("same_numbers"))
    words = {"equal": "equal to the bit", "rounding": "equal to rounding", "different": "different numbers"}
    detail = f"{proved.get('date')}: same training: {same or 'not asked'}; {proved.get('command')}"
    return words.get(numbers, numbers), detail, numbers != "different" and same != "no"


def _rollbacks(found: Sequence[Mapping[str, int]]) -> tuple[str, str, bool | None]:
    if not found:
        return "0", "no step was trained again because it was not finite", True
    last = found[-1]
    detail = f"the last: step {last['step']}, trained again from the checkpoint of step {last['checkpoint']}"
    return count(len(found)), detail, None


def _restarts(files: RunFiles) -> tuple[str, str, bool | None]:
    kinds = Counter(str(one.get("kind")) for one in files.restarts)
    more = files.result.get("restarts_not_listed")
    number = len(files.restarts) + (more if isinstance(more, int) else 0)
    detail = ", ".join(f"{many} {kind}" for kind, many in kinds.items())
    return count(number), detail or "every task ran from its start to its end", None if number else True


def _samples(files: RunFiles, *, ended: bool) -> tuple[str, str, bool | None]:
    """Return how many samples the weights have not seen exactly once per epoch."""
    skipped = files.result.get("skipped_steps")
    if not ended or not isinstance(skipped, list):
        return "not yet", "counted at the end of a run", None
    numbers = [one.get("num_samples") if isinstance(one, dict) else None for one in skipped]
    more = files.result.get("skipped_steps_not_listed")
    lost = sum(number for number in numbers if isinstance(number, int))
    if not skipped:
        again = "; a step that was trained again counts once" if files.restarts or files.rollbacks else ""
        return "0", f"no step was left out{again}", True
    steps = len(skipped) + (more if isinstance(more, int) else 0)
    at_least = "at least " if isinstance(more, int) else ""
    return f"{at_least}{count(lost)}", f"of {count(steps)} steps that were not finite (skipped_steps)", False
