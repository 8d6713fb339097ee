"""The page of a run: what it holds, how large it is, and what an enemy's files make of it."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trainkit
from tests.support.settings import latest
from trainkit.cli import main
from trainkit.errors import NonFiniteError
from trainkit.report.histogram_plot import draw_histograms
from trainkit.report.web.curves import Curve, MetricsReader
from trainkit.report.web.figures_document import figures_of
from trainkit.report.web.page import to_json
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.page import write_run_page
from trainkit.run.record import PageWriter

SHORT = ("recipe=null", "steps=24", "epochs=null", "callbacks=[]", "logger=[]", "quiet=true", "seed=3")


def content_of(page: str) -> dict[str, Any]:
    """What a browser reads from the text of a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    content: dict[str, Any] = json.loads(found[1])
    return content


def shown(page: Path) -> dict[str, Any]:
    """What a browser reads from the page."""
    return content_of(page.read_text())


def points(curve: dict[str, Any]) -> list[tuple[int, float | None]]:
    """The points of a curve, as charts.js reads them."""
    if "every" in curve:
        first, stride, number = curve["every"]
        steps = [first + stride * place for place in range(number)]
    else:
        steps = [*itertools.accumulate(curve["dx"])]
    return list(zip(steps, curve["y"], strict=True))


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a JSON map with its key; a list of plain values is one value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    inner = [(f"{key}.{name}" if isinstance(value, dict) else f"{key}[{name}]", one) for name, one in items]
    if not inner or (isinstance(value, list) and not any(isinstance(one, dict | list) for one in value)):
        yield key.removeprefix("."), value
    else:
        for name, one in inner:
            yield from leaves(one, name)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages") / "run"
    trainkit.train([*SHORT, "optimizer.lr=0.02"], run_dir=folder)
    return folder


def copied(run: Path, folder: Path) -> Path:
    folder.mkdir()
    for name in ("result.json", "resolved.yaml", "metrics.jsonl", "environment.json", "settings.json", "status.json"):
        (folder / name).write_bytes((run / name).read_bytes())
    return folder


def test_every_run_has_a_page_with_every_value_of_its_result(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    assert result["steps"] == 24
    rows = {key: json.loads(value) for key, value in shown(run / "report.html")["result"]}
    assert rows == dict(leaves(result))


def test_the_curves_are_those_of_metrics_jsonl(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for curve in shown(run / "report.html")["curves"]:
        logged = [(row["step"], row[curve["name"]]) for row in rows if curve["name"] in row]
        assert [step for step, _ in points(curve)] == [step for step, _ in logged]
        assert [value for _, value in points(curve)] == pytest.approx([value for _, value in logged], rel=1e-6)


def test_the_page_names_who_set_what_differs(run: Path) -> None:
    settings = {one["key"]: one for one in shown(run / "report.html")["settings"]}
    expected = {"key": "optimizer.lr", "value": "0.02", "recipe": "0.001", "set_by": "command line", "tag": "maths"}
    assert settings["optimizer.lr"] == expected
    assert settings["callbacks"]["tag"] == "cosmetic"


def test_the_trust_strip_shows_restarts_samples_and_the_hash_of_the_weights(run: Path) -> None:
    strip = {one["name"]: one["value"] for one in shown(run / "report.html")["trust"]}
    assert strip["restarts"] == strip["samples repeated or skipped"] == "0"
    assert strip["weights (SHA-256)"] == json.loads((run / "result.json").read_text())["weights_sha256"][:12]


def test_the_verdict_of_a_failed_step_names_no_other_step(run: Path, tmp_path: Path) -> None:
    folder = copied(run, tmp_path / "run")
    for reason, verdict in (
        ("step 1: the loss is nan", "Failed: step 1: the loss is nan"),
        ("ValueError: step 1: no", "Failed after 9 steps: ValueError: step 1: no"),
    ):
        (folder / "result.json").write_text(json.dumps({"status": "failed", "reason": reason, "steps": 9}))
        write_run_page(RunFolder(folder), folder / "report.html")
        assert shown(folder / "report.html")["verdict"] == verdict


def test_a_failed_run_names_the_step_and_how_many_came_after_it(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"^step 1: the loss is nan, .* It was read after 8 more steps: "):
        trainkit.train([*SHORT, "optimizer.lr=1e30"], run_dir=tmp_path / "run")
    assert shown(tmp_path / "run/report.html")["verdict"].startswith("Failed: step 1: the loss is nan, of the samples ")


def test_report_writes_the_page_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = shown(run / "report.html")
    (run / "report.html").unlink()
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run}/report.html\n"
    assert {**shown(run / "report.html"), "written": before["written"], "title": before["title"]} == before


def test_a_cosmetic_key_leaves_the_page_out(tmp_path: Path) -> None:
    trainkit.train(latest(*SHORT, "report_page=false", "steps=2"), run_dir=tmp_path / "run")
    assert not (tmp_path / "run/report.html").exists()


def test_report_refuses_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "is not a run folder: it has no resolved.yaml." in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["</script><script>alert(1)</script>", "\u202egnorw", "x" * 10_000, "<!--<script>"])
def test_hostile_names_are_text(run: Path, tmp_path: Path, name: str) -> None:
    folder = copied(run, tmp_path / "run")
    row = {"step": 1, "samples": 64, "seconds": 0.1, name: 0.5}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "result.json").write_text(json.dumps({"status": "failed", "reason": name, "metrics": {name: 1.5}}))
    write_run_page(RunFolder(folder), folder / "report.html")
    page = (folder / "report.html").read_text()
    assert page.count("</script>") == 2
    assert page.count("<script") == 2
    assert shown(folder / "report.html")["curves"][0]["name"].startswith(name[:300])


@pytest.mark.parametrize(
    "content", [b"", b"[" * 10_000, b"{}", b'{"metrics": 3, "plan": []}', b"\xff", b'{"status": 3}']
)
def test_damaged_files_leave_a_page(run: Path, tmp_path: Path, content: bytes) -> None:
    for name in (
        "result.json",
        "metrics.jsonl",
        "environment.json",
        "settings.json",
        "resolved.yaml",
        "restarts.jsonl",
    ):
        folder = copied(run, tmp_path / name)
        (folder / name).write_bytes(content)
        write_run_page(RunFolder(folder), folder / "report.html")
        assert shown(folder / "report.html")["kind"] == "run"


CONFUSION = '{"name": "val/confusion", "columns": ["class", "a", "b"], "rows": %s}'
LAYER = '{"step": %s, "weights": {"fc": {"quantiles": %s, "largest": %s}}}'


@pytest.mark.parametrize(
    "rows",
    [
        "{}",
        "[[1], [2]]",
        '[["a", -1, 2], ["b", 1, 2]]',
        '[["a", 1e308, 1e308], ["b", 0, 1e308]]',
        '[["a", NaN, 2], ["b", 1, 2]]',
        '[["a", {}, 2], ["b", 1, 2]]',
        "[" * 9000,
    ],
)
def test_a_matrix_of_another_form_is_left_out(rows: str, tmp_path: Path) -> None:
    (tmp_path / "tables.jsonl").write_text(CONFUSION % rows)
    assert figures_of(tmp_path)["confusion"] == []


@pytest.mark.parametrize(
    "record",
    [
        ("1", "[1, 2]", "3"),
        ("1", "{}", "[]"),
        ("1", "[1, 2, 3, 4, 5]", "1e999"),
        ("1e999", "[1, 2, 3, 4, 5]", "5"),
        ("1", "[NaN, 2, 3, 4, 5]", "5"),
        ("1", "[[], 2, 3, 4, 5]", "5"),
        ("[]", "[1, 2, 3, 4, 5]", "5"),
    ],
)
def test_records_of_layers_of_another_form_are_not_drawn(record: tuple[str, str, str], tmp_path: Path) -> None:
    line = LAYER % record
    (tmp_path / "histograms.jsonl").write_text(line)
    json.dumps(figures_of(tmp_path), allow_nan=False)
    assert draw_histograms(tmp_path, title="t", lines=[line]) == []


def test_a_layer_of_any_name_is_drawn(tmp_path: Path) -> None:
    line = (LAYER % ("1", "[1, 2, 3, 4, 5]", "5")).replace("fc", r"$\\frac$</script>")
    assert draw_histograms(tmp_path, title="$x_{", lines=[line]) == [tmp_path / "weights.png"]


def test_a_named_pipe_instead_of_a_file_does_not_block_the_page(run: Path, tmp_path: Path) -> None:
    folder = copied(run, tmp_path / "run")
    for name in ("metrics.jsonl", "settings.json", "report.html"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    write_run_page(RunFolder(folder), folder / "report.html")
    assert shown(folder / "report.html")["curves"] == []
    assert (folder / "report.html.aside").is_fifo()


@pytest.mark.parametrize("num_rows", [8_000, pytest.param(125_000, marks=pytest.mark.long)])
def test_the_page_of_many_points_shows_at_most_2000_a_curve(run: Path, tmp_path: Path, num_rows: int) -> None:
    folder = copied(run, tmp_path / "run")
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(num_rows):
            row = {f"train/term_{name}": (step * 7919 + name) % 10_007 / 9973.0 for name in range(8)}
            file.write(json.dumps({"step": step * 3, "samples": step, "seconds": step / 9, **row}) + "\n")
    write_run_page(RunFolder(folder), folder / "report.html")
    curves = shown(folder / "report.html")["curves"]
    assert [curve["seen"] for curve in curves] == [num_rows] * 8
    assert all(1_000 < len(points(curve)) <= 2_000 for curve in curves)


def test_a_curve_keeps_every_point_up_to_2000() -> None:
    curve = Curve()
    for step in range(2_000):
        curve.add(step, float(step))
    assert curve.points() == [(step, float(step)) for step in range(2_000)]


def test_a_longer_curve_keeps_the_minimum_the_maximum_and_the_last() -> None:
    values = [float((step * 7919) % 99_991) for step in range(40_000)]
    values[17_001], values[3], values[30_000] = -1.0, 1e9, float("nan")
    curve = Curve()
    for step, value in enumerate(values):
        curve.add(step, None if math.isnan(value) else value)
    kept = curve.points()
    assert len(kept) <= 2_000
    assert (17_001, -1.0) in kept
    assert (3, 1e9) in kept
    assert (30_000, None) in kept
    assert kept[-1] == (39_999, values[-1])
    assert kept == sorted(kept, key=lambda point: point[0])
    assert all(value is None or value == values[step] for step, value in kept)


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


def test_a_reader_rests_after_each_128_rows(tmp_path: Path) -> None:
    path, rests = tmp_path / "metrics.jsonl", []
    path.write_text("".join(f'{{"step": {step}, "a": 1.0}}\n' for step in range(300)))
    reader = MetricsReader(path, rest=lambda: rests.append(reader.rows.curves["a"].seen))
    assert reader.read().curves["a"].seen == 300
    assert rests == [128, 256]


def test_the_page_is_written_each_minute_and_after_an_evaluation(run: Path, tmp_path: Path) -> None:
    folder, now = copied(run, tmp_path / "run"), [0.0]
    writer = PageWriter(RunFolder(folder), clock=lambda: now[0])
    page = folder / "report.html"
    writer.write()
    written = page.stat().st_mtime_ns
    for moment, row, again in ((9.0, '{"step": 30, "val/loss": 1.0}', False), (10.0, "", True), (69.0, "", False)):
        now[0] = moment
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(f"{row}\n" if row else "")
        writer.look()
        assert (page.stat().st_mtime_ns != written) == again
        written = page.stat().st_mtime_ns
    now[0] = 70.0
    writer.look()
    assert page.stat().st_mtime_ns != written


def test_a_page_that_cannot_be_written_gives_one_warning_and_the_run_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no page")

    monkeypatch.setattr("trainkit.run.record.write_run_page", refuse)
    assert trainkit.train(latest(*SHORT, "steps=2"), run_dir=tmp_path / "run")["status"] == "finished"
    assert capsys.readouterr().out.count("report.html cannot be written: RuntimeError: no page") == 1


def test_a_file_of_the_user_with_the_name_of_the_page_is_renamed(run: Path, tmp_path: Path) -> None:
    folder = copied(run, tmp_path / "run")
    (folder / "report.html").write_text("<h1>mine</h1>")
    write_run_page(RunFolder(folder), folder / "report.html")
    assert (folder / "report.html.aside").read_text() == "<h1>mine</h1>"
    write_run_page(RunFolder(folder), folder / "report.html")
    assert sorted(path.name for path in folder.glob("report*")) == ["report.html", "report.html.aside"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_writer_that_is_killed_leaves_the_page_before_and_a_draft_that_the_next_one_removes(
    run: Path, tmp_path: Path
) -> None:
    folder = copied(run, tmp_path / "run")
    page = folder / "report.html"
    write_run_page(RunFolder(folder), page)
    before, child = page.read_bytes(), os.fork()
    if child == 0:
        Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment]
        write_run_page(RunFolder(folder), page)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert page.read_bytes() == before
    draft = folder / f".report.html.{child}"
    others = [folder / name for name in (".report.html.7", ".report.html.mine", "report.html.8", ".other.html.9")]
    for other in others:
        other.write_text("mine" if other.suffix == ".7" else draft.read_text())
    write_run_page(RunFolder(folder), page)
    assert draft.is_file()  # another process may be writing it
    for path in (draft, *others):
        os.utime(path, (1, 1))
    write_run_page(RunFolder(folder), page)
    assert [path.name for path in (draft, *others) if not path.exists()] == [draft.name]


@pytest.mark.slow
def test_the_commands_of_a_resumed_run_add_to_its_settings_and_its_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["trainkit", "seed=3"])
    trainkit.train([*SHORT, "stop_at_step=4", "eval.every_steps=3"], run_dir=folder)
    monkeypatch.setattr(sys, "argv", ["trainkit", "resume", str(folder)])
    assert main(latest("resume", str(folder), "log_every_steps=2", "quiet=true")) == 0
    settings = {one["key"]: one["value"] for one in shown(folder / "report.html")["settings"]}
    assert (settings["seed"], settings["log_every_steps"]) == ("3", "2")
    marks = [(one["kind"], one["step"]) for one in shown(folder / "report.html")["marks"]]
    assert ("restart", 4) in marks
    assert {("evaluation", 3), ("evaluation", 6)} < {*marks}
    repeat, again = (one["command"] for one in shown(folder / "report.html")["commands"])
    assert (repeat, again[:15]) == ("trainkit seed=3", "trainkit resume")


def test_json_in_a_page_holds_no_markup() -> None:
    assert "<" not in to_json({"<b>": ["</script>", "<!--"]})
    assert json.loads(to_json({"a": "</script>\u2028"})) == {"a": "</script>\u2028"}
