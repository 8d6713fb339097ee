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
from trainkit.report.curves import LoggedRows
from trainkit.report.web.run_document import RunFacts, RunFiles, Standing, run_document
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.heartbeat import Heartbeat

RESULT = {"status": "finished", "steps": 9, "seconds": 30.0, "seconds_total": 40.0, "skipped_steps": []}
RESTART = {"kind": "all", "cause": "rank 1 was killed", "step": 5, "rank": 1, "task": "worker:1", "checkpoint": 4}


def written(folder: Path, **files: Any) -> RunFiles:
    """The files of a run folder with this content, as a page reads them."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return RunFiles.read(folder)


def document(files: RunFiles, *lines: str, config: dict[str, Any] | None = None, state: str = "finished") -> Any:
    """What the page of a run with these lines of `metrics.jsonl` shows."""
    rows, standing = LoggedRows(), Standing(state=state, step=9, words="runs at step 9")
    for line in lines:
        rows.add(line.encode())
    return run_document(RunFacts(files=files, rows=rows, cfg=RunConfig.from_dict(config or {}), standing=standing))


def test_the_verdict_of_a_failed_step_names_no_other_step(tmp_path: Path) -> None:
    for reason, verdict in (("step 1: the loss is nan", "Failed"), ("ValueError: step 1: no", "Failed after 9 steps")):
        files = written(tmp_path, result={"status": "failed", "reason": reason, "steps": 9})
        assert document(files, state="failed")["verdict"] == f"{verdict}: {reason}"


@pytest.mark.parametrize(("mode", "step", "value"), [("max", 8, 0.9), ("min", 4, 0.2)])
def test_the_best_value_is_the_one_of_the_mode(tmp_path: Path, mode: str, step: int, value: float) -> None:
    lines = [f'{{"step": {step}, "val/score": {score}}}' for step, score in ((4, 0.2), (8, 0.9), (9, 0.5))]
    config = {"eval": {"metric": "val/score", "mode": mode}}
    best = document(written(tmp_path, result={**RESULT, "metrics": {"val/score": 0.5}}), *lines, config=config)["best"]
    assert (best["step"], best["value"], best["last"]) == (step, value, 0.5)


ROLLBACKS = [{"step": 7, "checkpoint": 5}, {"step": 31, "checkpoint": 30}, {"step": "1"}]
PROOF = {"date": "2026-11-01", "command": "trainkit prove", "same_training": "yes", "same_numbers": "equal"}
SKIPPED = [{"step": 3, "num_samples": 64}, {"step": 5, "num_samples": 6}]


def result(**more: Any) -> dict[str, Any]:
    return {"result": {**RESULT, **more}}


def strategy(**settings: Any) -> dict[str, Any]:
    return {"strategy": settings}


TO_THE_BIT = {"numerics": {"reproducible": True}}
STRIP: dict[str, list[tuple[dict[str, Any], dict[str, Any], str, bool | None]]] = {
    "reproducible": [  # files, config, value, whether it is good
        ({}, strategy(mode="async", workers="auto", replay=None), "no", False),
        ({}, strategy(mode="async", workers=1, replay=None), "to rounding", None),
        ({}, strategy(mode="async", workers=3, replay="outputs/run"), "to rounding", None),
        ({}, strategy(mode="async", compute_devices=["cpu"]), "to rounding", None),
        ({}, strategy(mode="sync", spare_mode="replace", spare_replicas=1), "no", False),
        ({}, strategy(mode="sync", spare_mode="replace", spare_replicas=0), "to rounding", None),
        ({}, TO_THE_BIT, "to the bit", True),
        ({"environment": {"git": {"dirty": True}}}, TO_THE_BIT, "no", False),
        ({"environment": {"notes": [f"a {AT_EQUAL_CUT} b"]}}, {}, "to rounding, at an equal batch.micro_size", None),
        (
            {"environment": {"notes": [], "begun": {"notes": ["other", f"{CUT_UNKNOWN}, too large."]}}},
            {},
            "to rounding, on as many replicas",
            None,
        ),
    ],
    "last proof": [
        ({}, {}, "not yet", None),
        (result(proved=None), {}, "none", None),
        (result(proved=PROOF), {}, "equal to the bit", True),
        (result(proved={**PROOF, "same_numbers": "rounding"}), {}, "equal to rounding", True),
        (result(proved={**PROOF, "same_numbers": "different"}), {}, "different numbers", False),
        (result(proved={**PROOF, "same_training": "no"}), {}, "equal to the bit", False),
    ],
    "restarts": [
        (result(), {}, "0", True),
        (result(restarts=[RESTART, {**RESTART, "kind": "alone"}], restarts_not_listed=4), {}, "6", None),
    ],
    "rollbacks": [
        (result(rollbacks=[]), {}, "0", True),
        (result(rollbacks=ROLLBACKS), {}, "2", None),
        ({"rollbacks": {"rollbacks": ROLLBACKS}}, {}, "2", None),  # while it runs
    ],
    "samples repeated or skipped": [
        ({}, {}, "not yet", None),
        (result(), {}, "0", True),
        (result(skipped_steps=SKIPPED), {}, "70", False),
        (result(skipped_steps=SKIPPED, skipped_steps_not_listed=8), {}, "at least 70", False),
    ],
}


@pytest.mark.parametrize("name", STRIP)
def test_the_trust_strip_shows_what_supports_the_figures_and_what_does_not(tmp_path: Path, name: str) -> None:
    for number, (content, config, value, good) in enumerate(STRIP[name]):
        (tmp_path / str(number)).mkdir()
        trust = document(written(tmp_path / str(number), **content), config=config)["trust"]
        assert [(row["value"], row["good"]) for row in trust if row["name"] == name] == [(value, good)], number


def test_the_trust_strip_says_of_what_it_counts(tmp_path: Path) -> None:
    counted = {"restarts": [RESTART, RESTART, {**RESTART, "kind": "alone"}], "rollbacks": ROLLBACKS}
    files = written(tmp_path, **result(**counted, skipped_steps=SKIPPED, skipped_steps_not_listed=8))
    details = {row["name"]: row["detail"] for row in document(files)["trust"]}
    assert details["restarts"] == "2 all, 1 alone"
    assert details["rollbacks"] == "the last: step 31, trained again from the checkpoint of step 30"
    assert details["samples repeated or skipped"] == "of 10 steps that were not finite (skipped_steps)"


def test_the_samples_of_an_active_run_and_an_unreadable_config_are_not_judged(tmp_path: Path) -> None:
    active = document(written(tmp_path, **result()), state="running")["trust"]
    assert {row["name"]: row["value"] for row in active}["samples repeated or skipped"] == "not yet"
    (tmp_path / "resolved.yaml").write_text("{")
    assert {row["name"]: row["value"] for row in page_of(tmp_path)["trust"]}["reproducible"] == "unknown"


def test_checkpoints_evaluations_and_restarts_are_marked(tmp_path: Path) -> None:
    for step in (4, 8, 9):
        checkpoint = tmp_path / f"checkpoints/step_{step:08}"
        checkpoint.mkdir(parents=True)
        if step != 9:  # without a manifest it is none
            (checkpoint / "manifest.json").write_text("{}")
    (tmp_path / "checkpoints/index.json").write_text('{"best": "step_00000004"}')
    (tmp_path / "restarts.jsonl").write_text(json.dumps(RESTART) + "\n")
    files = written(tmp_path, settings={"settings": [], "continued_at": [8]}, rollbacks={"rollbacks": ROLLBACKS[:1]})
    marks = document(files, '{"step": 6, "val/loss": 1.0}')["marks"]
    assert [(row["kind"], row["step"], row["text"]) for row in marks] == [
        ("checkpoint", 4, "best"),
        ("checkpoint", 8, ""),
        ("evaluation", 6, ""),
        ("restart", 8, "continued by another command"),
        ("rollback", 7, "trained again from step 5"),
        ("restart", 5, "rank 1 was killed"),
    ]


def test_goodput_is_the_training_over_the_time_of_the_command(tmp_path: Path) -> None:
    line = '{"step": 1, "samples": 1, "seconds": 30.0, "data_wait": 0.5}'
    time = document(written(tmp_path, result={**RESULT, "model_seconds": 10.0}), line)["time"]
    assert time["goodput"] == 0.6
    assert [(row["name"], row["seconds"]) for row in time["parts"]] == [
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
    time = page_of(tmp_path)["time"]
    assert time["goodput"] == 0.3
    assert time["parts"][2] == {"name": "restarts, start, evaluation and saving", "seconds": 65.0}
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
    time = document(written(tmp_path, **files), config=config)["time"]
    assert time["goodput"] is None
    assert why in time["note"]


def test_the_plan_stands_beside_what_was_measured(tmp_path: Path) -> None:
    at_end = {"memory": 130, "step_s": 0.25, "bytes_a_step": None}
    measured = {"memory": 120, "step_s": None, "bytes_a_step": 0.0, "per_cent": {"memory": 20.0}, "at_end": at_end}
    plan = {"memory": 100, "step_s": None, "bytes_a_step": None}
    rows = document(written(tmp_path, result={**RESULT, "plan": plan, "measured": measured}))["plan"]
    assert [tuple(row.values()) for row in rows] == [
        ("memory", "peak memory", 100.0, 120.0, 130.0, 20.0),
        ("step_s", "time of a step", None, None, 0.25, None),
        ("bytes_a_step", "data sent in a step", None, 0.0, None, None),
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
    evaluation = tmp_path / "evaluations/best-val"
    evaluation.mkdir(parents=True)
    table = {"columns": ["sample", "loss"], "rows": [[7, 2.5], "no row", *([[8, 1.5]] * 40)]}
    content = {"split": "val", "checkpoint": "best", "tables": {"val/worst": table}}
    (evaluation / "evaluation.json").write_text(json.dumps(content))
    worst = document(RunFiles.read(tmp_path))["worst"]
    assert (worst["what"], worst["columns"]) == ("split val, checkpoint best", ["sample", "loss"])
    assert (worst["rows"][:2], len(worst["rows"])) == ([["7", "2.5"], ["8", "1.5"]], 32)
    for size, is_shown in ((100, True), (1 << 20, False)):
        (evaluation / "worst.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(size))
        assert (document(RunFiles.read(tmp_path))["worst"]["picture"] is not None) == is_shown


def test_a_continued_run_is_repeated_by_the_command_that_began_it(tmp_path: Path) -> None:
    environment = {"argv": ["/bin/trainkit", "resume", "run"], "begun": {"argv": ["/bin/trainkit", "seed=3", "a=[]"]}}
    commands = document(written(tmp_path, environment=environment, result={**RESULT, "resume": "again"}))["commands"]
    assert [(row["what"], row["command"]) for row in commands] == [
        ("repeat", "trainkit seed=3 'a=[]'"),
        ("continue", "again"),
    ]
    files = written(tmp_path, environment={"argv": ["train.py", "seed=3"]}, result=RESULT)
    assert document(files)["commands"] == [{"what": "repeat", "command": "python train.py seed=3"}]
