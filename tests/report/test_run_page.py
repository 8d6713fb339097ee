"""A page with a value, a point or a setting that the files of the run do not have is caught here alone; so is a
damaged or hostile file that leaves no page, and a curve that loses its extremes.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import trainkit
from tests.support.results import result_of
from tests.support.settings import latest
from trainkit.cli import main
from trainkit.report.curves import Curve, LoggedRows, MetricsReader
from trainkit.report.web.page import to_json
from trainkit.report.web.run_document import figures_of
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.folder.status import read_status
from trainkit.run.record import PageWriter, write_run_page

SHORT = ("recipe=null", "steps=24", "epochs=null", "callbacks=[]", "logger=[]", "quiet=true", "seed=3")


def content_of(page: str) -> dict[str, Any]:
    """What a browser reads from the text of a page."""
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    content: dict[str, Any] = json.loads(match[1])
    return content


def shown(page: Path) -> dict[str, Any]:
    """What a browser reads from the page."""
    return content_of(page.read_text())


def written(folder: Path) -> dict[str, Any]:
    """Write the page of a run folder, and read it."""
    write_run_page(RunFolder(folder), folder / "report.html")
    return shown(folder / "report.html")


def points(curve: dict[str, Any]) -> list[tuple[int, float | None]]:
    """The points of a curve, as charts.js reads them."""
    if "every" in curve:
        first, stride, number = curve["every"]
        steps = [first + stride * index for index in range(number)]
    else:
        steps = [*itertools.accumulate(curve["dx"])]
    return list(zip(steps, curve["y"], strict=True))


def test_every_run_has_a_page_with_every_value_of_its_result_and_its_curves(run: Path) -> None:
    page, result = shown(run / "report.html"), result_of(run)
    assert result["steps"] == 24
    result_values = {key: json.loads(value) for key, value in page["result"]}
    assert {re.split(r"[.\[]", key)[0] for key in result_values} == {*result}
    plain = {key: value for key, value in result.items() if not isinstance(value, dict | list)}
    assert {**result_values, **plain, "metrics.val/loss": result["metrics"]["val/loss"]} == result_values
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for curve in page["curves"]:
        logged = [(row["step"], row[curve["name"]]) for row in rows if curve["name"] in row]
        assert [step for step, _ in points(curve)] == [step for step, _ in logged]
        assert [value for _, value in points(curve)] == pytest.approx([value for _, value in logged], rel=1e-6)


def test_the_page_names_who_set_what_differs_and_the_weights(run: Path) -> None:
    page = shown(run / "report.html")
    settings = {row["key"]: row for row in page["settings"]}
    expected = {"key": "optimizer.lr", "value": "0.02", "recipe": "0.001", "set_by": "command line", "tag": "maths"}
    assert settings["optimizer.lr"] == expected
    assert settings["callbacks"]["tag"] == "cosmetic"
    strip = {row["name"]: row["value"] for row in page["trust"]}
    assert strip["restarts"] == strip["samples repeated or skipped"] == "0"
    assert strip["weights (SHA-256)"] == result_of(run)["weights_sha256"][:12]


def test_report_writes_the_page_again_and_refuses_what_is_no_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, page = shown(run / "report.html"), tmp_path / "page.html"
    assert main(["report", str(run), "--out", str(page)]) == 0
    assert capsys.readouterr().out == f"{page}\n"
    assert {**shown(page), "written": before["written"]} == before
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty")]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_cosmetic_key_leaves_the_page_out(tmp_path: Path) -> None:
    trainkit.train(latest(*SHORT, "report_page=false", "steps=2"), run_dir=tmp_path / "run")
    assert not (tmp_path / "run/report.html").exists()


@pytest.mark.parametrize("name", ["</script><!--<script>alert(1)</script>", "\u202e" + "x" * 10_000])
def test_hostile_names_are_text(tmp_path: Path, name: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "samples": 64, "seconds": 0.1, name: 0.5}) + "\n")
    (tmp_path / "result.json").write_text(json.dumps({"status": "failed", "reason": name, "metrics": {name: 1.5}}))
    assert written(tmp_path)["curves"][0]["name"].startswith(name[:300])
    page = (tmp_path / "report.html").read_text()
    assert page.count("</script>") == page.count("<script") == 2
    assert "<" not in to_json({"<b>": ["</script>", "<!--"]})


@pytest.mark.parametrize("content", [b"[" * 10_000, b'{"metrics": 3, "plan": [], "status": 3}', b"\xff"])
def test_damaged_files_leave_a_page(run: Path, tmp_path: Path, content: bytes) -> None:
    for name in ("result.json", "resolved.yaml", "metrics.jsonl", "environment.json", "settings.json"):
        folder = shutil.copytree(run, tmp_path / name)
        (folder / name).write_bytes(content)
        assert written(folder)["kind"] == "run"


LAYER = '{"step": %s, "weights": {"fc": {"quantiles": %s, "largest": %s}}}'


def test_a_matrix_or_record_of_layers_of_another_form_is_left_out(tmp_path: Path) -> None:
    line = '{"name": "val/confusion", "columns": ["class", "a", "b"], "rows": %s}'
    for rows in ("{}", "[[1], [2]]", '[["a", -1, 2], ["b", 1, 2]]', '[["a", 0, 1e308], ["b", 0, 1]]'):
        (tmp_path / "tables.jsonl").write_text(line % rows)
        assert figures_of(tmp_path)["confusion"] == []
    for record in (("1", "[1, 2]", "3"), ("1e999", "[NaN, 2, 3, 4, 5]", "5"), ("[]", "{}", "1e999")):
        (tmp_path / "histograms.jsonl").write_text(LAYER % record)
        json.dumps(figures_of(tmp_path), allow_nan=False)


def test_a_named_pipe_instead_of_a_file_does_not_block_the_page(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    for name in ("metrics.jsonl", "settings.json", "report.html"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    assert written(folder)["curves"] == []
    assert (folder / "report.html.aside").is_fifo()


def test_a_curve_of_up_to_2000_points_is_whole_and_a_longer_one_keeps_its_extremes_evenly() -> None:
    values = [float((step * 7919) % 99_991) for step in range(40_000)]
    values[17_001], values[3], values[30_001] = -1.0, 1e9, float("nan")
    curve = Curve()
    for step, value in enumerate(values):
        curve.add(step, None if math.isnan(value) else value)
        if step == 1_999:
            assert curve.points() == list(enumerate(values[:2_000]))
    points = curve.points()
    assert {(17_001, -1.0), (3, 1e9), (30_001, None), (39_999, values[-1])} < {*points}
    assert all(value is None or value == values[step] for step, value in points)
    steps = [step for step, _ in points]
    assert (len(points) <= 2_000, steps) == (True, sorted(steps))
    assert max(later - earlier for earlier, later in itertools.pairwise(steps)) < 160  # twice the width of a bucket


def test_of_more_than_200_metrics_the_first_200_are_kept() -> None:
    rows = LoggedRows()
    for step in (1, 2):
        rows.add(json.dumps({"step": step, **{f"train/{number}": step for number in range(203)}}).encode())
    assert [rows.curves[f"train/{number}"].num_points for number in range(200)] == [2] * 200
    assert (len(rows.curves), rows.left_out) == (200, {"train/200", "train/201", "train/202"})


def test_rows_that_a_resumed_run_drops_are_dropped_from_the_curves(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = MetricsReader(path)
    path.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a": 2.0}\n')
    assert reader.read().curves["a"].points() == [(1, 1.0), (2, 2.0)]
    path.write_text('{"step": 1, "a": 1.0}\n')
    assert reader.read().curves["a"].points() == [(1, 1.0)]
    with path.open("a") as file:
        file.write('{"step": 2, "a": null}\n{"step": 3')
    assert reader.read().curves["a"].points() == [(1, 1.0), (2, None)]


def test_the_page_is_written_each_minute_and_after_an_evaluation(run: Path, tmp_path: Path) -> None:
    folder, clock = shutil.copytree(run, tmp_path / "run"), [0.0]
    writer = PageWriter(RunFolder(folder), clock=lambda: clock[0])
    page, evaluation = folder / "report.html", '{"step": 30, "val/loss": 1.0}\n'
    writer.write()
    moments = ((9.0, evaluation, False), (10.0, "", True), (69.0, "", False), (70.0, "", True))
    for moment, row, is_due in moments:
        written_at, clock[0] = page.stat().st_mtime_ns, moment
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(row)
        writer.look()
        assert (page.stat().st_mtime_ns != written_at) == is_due


def test_the_page_of_a_running_run_alone_loads_itself_again(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "http-equiv=refresh" not in (run / "report.html").read_text()
    status = replace(read_status(RunFolder(run)), state="running")
    monkeypatch.setattr("trainkit.run.record.read_status", lambda _: status)
    write_run_page(RunFolder(run), tmp_path / "page.html")
    assert "<meta http-equiv=refresh content=30>" in (tmp_path / "page.html").read_text()


def test_a_page_that_cannot_be_written_gives_one_warning_and_the_run_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no page")

    monkeypatch.setattr("trainkit.run.record.write_run_page", refuse)
    assert trainkit.train(latest(*SHORT, "steps=2"), run_dir=tmp_path / "run")["status"] == "finished"
    assert capsys.readouterr().out.count("report.html cannot be written: RuntimeError: no page") == 1


def test_a_file_of_the_user_with_the_name_of_the_page_is_renamed_once(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("<h1>mine</h1>")
    for _ in range(2):
        written(tmp_path)
        assert (tmp_path / "report.html.aside").read_text() == "<h1>mine</h1>"
    assert len([*tmp_path.glob("report*")]) == 2


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_writer_that_is_killed_leaves_the_page_before(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    write_run_page(RunFolder(tmp_path), page)
    before, child = page.read_bytes(), os.fork()
    if child == 0:
        Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment]
        write_run_page(RunFolder(tmp_path), page)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert page.read_bytes() == before


@pytest.mark.slow
def test_the_commands_of_a_resumed_run_add_to_its_settings_and_its_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["trainkit", "seed=3"])
    trainkit.train([*SHORT, "stop_at_step=4", "eval.every_steps=3"], run_dir=folder)
    monkeypatch.setattr(sys, "argv", ["trainkit", "resume", str(folder)])
    assert main(latest("resume", str(folder), "log_every_steps=2", "quiet=true")) == 0
    page = shown(folder / "report.html")
    settings = {row["key"]: row["value"] for row in page["settings"]}
    assert (settings["seed"], settings["log_every_steps"]) == ("3", "2")
    marks = {(row["kind"], row["step"]) for row in page["marks"]}
    assert {("restart", 4), ("evaluation", 3), ("evaluation", 6)} < marks
    repeat, again = (row["command"] for row in page["commands"])
    assert (repeat, again[:15]) == ("trainkit seed=3", "trainkit resume")
