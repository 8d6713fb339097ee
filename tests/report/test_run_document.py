"""A page that calls an unreproducible run reproducible, the worst value the best, or a wrong share of the time its
goodput is caught here alone: the trust strip, marks, times, plan, ranks, worst samples and commands.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.report.test_run_page import written as page_of
from trainkit.config.schema import RunConfig
from trainkit.numerics.batch import AT_EQUAL_CUT, CUT_UNKNOWN
from trainkit.report.web.curves import LoggedRows
from trainkit.report.web.run_document import RunFacts, Standing, run_document
from trainkit.report.web.run_files import RunFiles
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.heartbeat import Heartbeat

RESULT = {"status": "finished", "steps": 9, "seconds": 30.0, "seconds_total": 40.0, "skipped_steps": []}
RESTART = {"kind": "all", "cause": "rank 1 was killed", "step": 5, "rank": 1, "task": "worker:1", "checkpoint": 4}


def written(folder: Path, **files: Any) -> RunFiles:
    """The files of a run folder with this content, as a page reads them."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return RunFiles.read(folder)


def document(
    files: RunFiles, *lines: str, config: dict[str, Any] | None = None, state: str = "finished", **facts: Any
) -> Any:
    """What the page of a run with these lines of `metrics.jsonl` shows."""
    rows, standing = LoggedRows(), Standing(state=state, step=9, words="runs at step 9")
    for line in lines:
        rows.add(line.encode())
    return run_document(
        RunFacts(files=files, rows=rows, cfg=RunConfig.from_dict(config or {}), standing=standing, **facts)
    )


def strip(files: RunFiles, **options: Any) -> dict[str, tuple[str, str, bool | None]]:
    """Name -> value, detail and `good` of the items of the trust strip."""
    found = document(files, **options)["trust"]
    return {one["name"]: (one["value"], one["detail"], one["good"]) for one in found}


@pytest.mark.parametrize(("mode", "step", "value"), [("max", 8, 0.9), ("min", 4, 0.2)])
def test_the_best_value_is_the_one_of_the_mode(tmp_path: Path, mode: str, step: int, value: float) -> None:
    lines = [f'{{"step": {at}, "val/score": {score}}}' for at, score in ((4, 0.2), (8, 0.9), (9, 0.5))]
    config = {"eval": {"metric": "val/score", "mode": mode}}
    best = document(written(tmp_path, result={**RESULT, "metrics": {"val/score": 0.5}}), *lines, config=config)["best"]
    assert (best["step"], best["value"], best["last"]) == (step, value, 0.5)


@pytest.mark.parametrize(
    ("strategy", "value"),
    [
        ({"mode": "async", "workers": "auto", "replay": None}, "no"),
        ({"mode": "async", "workers": 1, "replay": None}, "to rounding"),
        ({"mode": "async", "workers": 3, "replay": "outputs/run"}, "to rounding"),
        ({"mode": "sync", "spare_mode": "replace", "spare_replicas": 1}, "no"),
        ({"mode": "sync", "spare_mode": "replace", "spare_replicas": 0}, "to rounding"),
        ({"mode": "async", "compute_devices": ["cpu"]}, "to rounding"),
    ],
)
def test_what_depends_on_which_process_is_faster_is_not_reproducible(
    tmp_path: Path, strategy: dict[str, Any], value: str
) -> None:
    found = strip(written(tmp_path), config={"strategy": strategy})["reproducible"]
    assert (found[0], found[2]) == (value, False if value == "no" else None)


def test_a_run_is_reproducible_to_the_bit_only_from_a_commit_and_a_readable_config(tmp_path: Path) -> None:
    config = {"numerics": {"reproducible": True}}
    assert strip(written(tmp_path), config=config)["reproducible"][::2] == ("to the bit", True)
    dirty = written(tmp_path, environment={"git": {"dirty": True}})
    assert strip(dirty, config=config)["reproducible"][::2] == ("no", False)
    (tmp_path / "resolved.yaml").write_text("{")
    trust = {one["name"]: one["value"] for one in page_of(tmp_path)["trust"]}
    assert trust["reproducible"] == "unknown"


def test_a_model_that_draws_is_the_same_training_at_an_equal_cut_only(tmp_path: Path) -> None:
    equal, unknown = f"the model draws: ... {AT_EQUAL_CUT} (here 64).", f"{CUT_UNKNOWN}, it is too large."
    begun = {"notes": [], "begun": {"notes": ["another", unknown]}}
    for content, note, value in (
        ({"notes": [equal]}, equal, "to rounding, at an equal batch.micro_size"),
        (begun, unknown, "to rounding, on as many replicas"),
    ):
        found = strip(written(tmp_path, environment=content))["reproducible"]
        assert (found[0], found[1].startswith(note), found[2]) == (value, True, None)


def test_the_strip_shows_the_last_proof(tmp_path: Path) -> None:
    assert strip(written(tmp_path))["last proof"][::2] == ("not yet", None)
    proof = {"date": "2026-11-01", "command": "trainkit prove", "same_training": "yes", "same_numbers": "equal"}
    for proved, shown in (
        (proof, ("equal to the bit", True)),
        ({**proof, "same_numbers": "rounding"}, ("equal to rounding", True)),
        ({**proof, "same_numbers": "different"}, ("different numbers", False)),
        ({**proof, "same_training": "no"}, ("equal to the bit", False)),
        (None, ("none", None)),
    ):
        assert strip(written(tmp_path, result={**RESULT, "proved": proved}))["last proof"][::2] == shown


def test_the_strip_counts_restarts_by_kind(tmp_path: Path) -> None:
    assert strip(written(tmp_path, result=RESULT))["restarts"][::2] == ("0", True)
    restarts = [RESTART, RESTART, {**RESTART, "kind": "alone"}]
    files = written(tmp_path, result={**RESULT, "restarts": restarts, "restarts_not_listed": 4})
    assert strip(files)["restarts"] == ("7", "2 all, 1 alone", None)


def test_the_strip_counts_the_samples_of_skipped_steps(tmp_path: Path) -> None:
    name, skipped = "samples repeated or skipped", [{"step": 3, "num_samples": 64}, {"step": 5, "num_samples": 6}]
    assert strip(written(tmp_path, result=RESULT), state="running")[name][0] == "not yet"
    assert strip(written(tmp_path, result=RESULT))[name] == ("0", "no step was left out", True)
    found = strip(written(tmp_path, result={**RESULT, "skipped_steps": skipped}))[name]
    assert found == ("70", "of 2 steps that were not finite (skipped_steps)", False)
    more = written(tmp_path, result={**RESULT, "skipped_steps": skipped, "skipped_steps_not_listed": 8})
    assert strip(more)[name] == ("at least 70", "of 10 steps that were not finite (skipped_steps)", False)


def test_rollbacks_stand_in_the_strip_and_on_the_curves(tmp_path: Path) -> None:
    assert "rollbacks" not in strip(written(tmp_path))
    rollbacks = [{"step": 7, "checkpoint": 5}, {"step": 31, "checkpoint": 30}, {"step": "1"}]
    while_it_runs = written(tmp_path, rollbacks={"rollbacks": rollbacks})
    for files in (while_it_runs, written(tmp_path, result={**RESULT, "rollbacks": rollbacks})):
        detail = "the last: step 31, trained again from the checkpoint of step 30"
        assert strip(files)["rollbacks"] == ("2", detail, None)
        marks = [one for one in document(files)["marks"] if one["kind"] == "rollback"]
        assert marks[0] == {"kind": "rollback", "step": 7, "text": "trained again from step 5"}


def test_checkpoints_evaluations_and_restarts_are_marked(tmp_path: Path) -> None:
    for step in (4, 8, 9):
        place = tmp_path / f"checkpoints/step_{step:08}"
        place.mkdir(parents=True)
        if step != 9:  # without a manifest it is none
            (place / "manifest.json").write_text("{}")
    (tmp_path / "checkpoints/index.json").write_text('{"best": "step_00000004"}')
    (tmp_path / "restarts.jsonl").write_text(json.dumps(RESTART) + "\n")
    files = written(tmp_path, settings={"settings": [], "continued_at": [8]})
    found = document(files, '{"step": 6, "val/loss": 1.0}')["marks"]
    assert [(one["kind"], one["step"], one["text"]) for one in found] == [
        ("checkpoint", 4, "best"),
        ("checkpoint", 8, ""),
        ("evaluation", 6, ""),
        ("restart", 8, "continued by another command"),
        ("restart", 5, "rank 1 was killed"),
    ]


def test_goodput_is_the_training_over_the_time_of_the_command(tmp_path: Path) -> None:
    line = '{"step": 1, "samples": 1, "seconds": 30.0, "data_wait": 0.5}'
    found = document(written(tmp_path, result={**RESULT, "model_seconds": 10.0}), line)["time"]
    assert found["goodput"] == 0.6
    assert [(one["name"], one["seconds"]) for one in found["parts"]] == [
        ("steps", 15.0),
        ("waiting for data", 15.0),
        ("start, evaluation and saving", 10.0),
        ("writing the model", 10.0),
    ]


def test_goodput_of_a_restarted_run_counts_all_its_starts(tmp_path: Path) -> None:
    status = {
        "state": "finished", "step": 9, "pid": 1, "process_start": 1, "host": "h", "boot_id": "b", "processes": "p",
        "resumable": True, "updated": 1_000_000_100.0,
    }  # fmt: skip
    result = {**RESULT, "restarts": [RESTART], "model_seconds": 5.0}
    written(tmp_path, result=result, status=status, environment={"started": "2001-09-09T01:46:40+00:00"})
    found = page_of(tmp_path)["time"]
    assert found["goodput"] == 0.3
    assert found["parts"][2] == {"name": "restarts, start, evaluation and saving", "seconds": 65.0}
    alone = written(tmp_path, result={**RESULT, "restarts": [{**RESTART, "kind": "alone"}]})
    assert document(alone)["time"]["goodput"] == 0.75


@pytest.mark.parametrize(
    ("files", "config", "why"),
    [
        ({}, {}, "known at the end of a run"),
        ({"result": {**RESULT, "restarts": [RESTART]}}, {}, "the time of all its starts was not recorded"),
        ({"result": RESULT, "settings": {"settings": [], "continued_at": [4]}}, {}, "the command that began it"),
        ({"result": RESULT, "environment": {"begun": {"argv": ["a"]}}}, {}, "the command that began it"),
        ({"result": RESULT}, {"resume": "other/checkpoints"}, "a checkpoint of another run"),
    ],
)
def test_a_page_says_why_the_goodput_is_not_known(
    tmp_path: Path, files: dict[str, Any], config: dict[str, Any], why: str
) -> None:
    found = document(written(tmp_path, **files), config=config)["time"]
    assert found["goodput"] is None
    assert why in found["note"]


def test_the_plan_stands_beside_what_was_measured(tmp_path: Path) -> None:
    at_end = {"memory": 130, "step_s": 0.25, "bytes_a_step": None}
    measured = {"memory": 120, "step_s": None, "bytes_a_step": 0.0, "per_cent": {"memory": 20.0}, "at_end": at_end}
    plan = {"memory": 100, "step_s": None, "bytes_a_step": None}
    found = document(written(tmp_path, result={**RESULT, "plan": plan, "measured": measured}))["plan"]
    assert [tuple(row.values()) for row in found] == [
        ("bytes at the peak", 100.0, 120.0, 130.0, 20.0),
        ("seconds a step", None, None, 0.25, None),
        ("bytes sent a step", None, 0.0, None, None),
    ]


def test_the_last_sign_of_each_rank_is_shown(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.live.mkdir()
    for rank, step in ((0, 12), (2, 11)):
        heartbeat = Heartbeat(folder.heartbeat_of(rank))
        heartbeat.beat(step, "forward")
        heartbeat.close()
    (folder.live / "rank_2.log").write_text("")
    assert page_of(tmp_path)["ranks"] == [
        {"rank": 0, "step": 12, "phase": "forward", "log": "train.log"},
        {"rank": 2, "step": 11, "phase": "forward", "log": "logs/rank_2.log"},
    ]


def test_the_worst_samples_of_an_evaluation_are_shown_with_a_small_picture(tmp_path: Path) -> None:
    place = tmp_path / "evaluations/best-val"
    place.mkdir(parents=True)
    table = {"columns": ["sample", "loss"], "rows": [[7, 2.5], "no row", *([[8, 1.5]] * 40)]}
    content = {"split": "val", "checkpoint": "best", "tables": {"val/worst": table}}
    (place / "evaluation.json").write_text(json.dumps(content))
    found = document(RunFiles.read(tmp_path))["worst"]
    assert (found["what"], found["columns"]) == ("split val, checkpoint best", ["sample", "loss"])
    assert (found["rows"][:2], len(found["rows"])) == ([["7", "2.5"], ["8", "1.5"]], 32)
    for size, is_shown in ((100, True), (48_000, False)):
        (place / "worst.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(size))
        assert (document(RunFiles.read(tmp_path))["worst"]["picture"] is not None) == is_shown


def test_a_continued_run_is_repeated_by_the_command_that_began_it(tmp_path: Path) -> None:
    environment = {"argv": ["/bin/trainkit", "resume", "run"], "begun": {"argv": ["/bin/trainkit", "seed=3", "a=[]"]}}
    commands = document(written(tmp_path, environment=environment, result={**RESULT, "resume": "again"}))["commands"]
    assert [(one["what"], one["command"]) for one in commands] == [
        ("repeat", "trainkit seed=3 'a=[]'"),
        ("continue", "again"),
    ]
    files = written(tmp_path, environment={"argv": ["train.py", "seed=3"]}, result=RESULT)
    assert document(files)["commands"] == [{"what": "repeat", "command": "python train.py seed=3"}]
