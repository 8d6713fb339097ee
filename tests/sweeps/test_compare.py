"""An answer of `trainkit compare` that chance or a divergence gave, and two trainings that are called one."""

from __future__ import annotations

import json
import os
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import variance
from typing import Any

import jsonschema
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from trainkit.cli import main
from trainkit.config.schema import RunConfig
from trainkit.errors import ConfigError
from trainkit.sweeps.results import pairs
from trainkit.sweeps.results.pairs import Side, compare, ended_runs, read_side
from trainkit.sweeps.results.starts import shapes_differ, write_start
from trainkit.sweeps.results.states import state_of
from trainkit.sweeps.verdict import verdict
from trainkit.trained.build import build_model
from trainkit.verbs.looking import report
from trainkit.verbs.looking.schema import schema_of
from trainkit.verbs.running import compare as verb
from trainkit.verbs.support.call import Call, parse

POOL = json.loads((Path(__file__).parent / "digits.json").read_text())


def side(root: Path, values: Sequence[float | None], metric: str = "val/loss", **config: Any) -> Side:
    """Return a side with a run for each seed; None has failed."""
    for seed, value in enumerate(values):
        folder = root / str(seed)
        folder.mkdir(parents=True)
        (folder / "resolved.yaml").write_text(yaml.dump({"seed": seed, **config}))
        status = "failed" if value is None else "finished"
        result = {"status": status, "metrics": {metric: value}, "seconds": 1.5, "weights_sha256": f"{root.name}{seed}"}
        (folder / "result.json").write_text(json.dumps(result))
        (folder / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.3}\n')
    return read_side(str(root))


def judged(a: Side, b: Side, metric: str | None = None, **settings: Any) -> Any:
    return compare(a, b, metric=metric, **settings)


def test_five_pairs_of_digits_tell_two_weight_decays_apart(tmp_path: Path) -> None:
    b = side(tmp_path / "b", POOL["loss"][:5])
    losses = POOL["changed"]["optimizer.weight_decay=0.1"][:5]
    comparison = judged(side(tmp_path / "a", losses, clip={"max_norm": 1.0}), b)
    assert comparison["line"].startswith("better  val/loss -0.00"), comparison["line"]
    assert comparison["line"].endswith("], 95 % at any look, 5 pairs, this validation set")
    assert comparison["gain_of_pairing"] > 1
    assert [difference["key"] for difference in comparison["differences"]] == ["clip.max_norm"]
    assert judged(b, read_side(str(tmp_path / "a")))["answer"] == "worse"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "resolution"), [("loss", 0.0), ("correct", 1.0)])
def test_of_400_equal_trainings_looked_at_after_each_pair_few_are_told_apart(kind: str, resolution: float) -> None:
    chance, wins = random.Random(0), 0
    for _ in range(400):
        seeds = chance.sample(range(200), 60)
        gaps = [POOL[kind][first] - POOL[kind][second] for first, second in zip(seeds[:30], seeds[30:], strict=True)]
        looks = (verdict(gaps[:pairs], resolution=resolution, budget=0).answer for pairs in range(4, 31))
        wins += any(answer in ("better", "worse") for answer in looks)
    assert wins <= 20  # 5 %


def test_pairing_gains_what_the_page_says() -> None:
    page = (Path(__file__).parents[2] / "docs/noise.md").read_text()
    gains = {
        "`optimizer.weight_decay=0.1`": "optimizer.weight_decay=0.1",
        "`model.activation=gelu`": "model.activation=gelu",
        "`model.hidden=[136]`, equal parts start equal": "model.hidden=[136], equal start",
    }
    for title, name in gains.items():
        pairs = [*zip(POOL["loss"], POOL["changed"][name], strict=False)]
        gain = sum(map(variance, zip(*pairs, strict=True))) / variance([later - earlier for earlier, later in pairs])
        row = re.search(rf"^\| {re.escape(title)} \| [^|]+ \| ([\d.]+) \|", page, re.MULTILINE)
        assert row is not None
        assert f"{gain:.2g}" == row[1]


@pytest.mark.slow
def test_a_layer_that_grew_starts_with_the_weights_of_the_smaller_one(tmp_path: Path) -> None:
    a, b, other = (
        RunConfig(model={"_target_": "trainkit.models.Mlp", "in_features": 4, "hidden": [hidden], "out_features": 2})
        for hidden in (3, 5, 3)
    )
    assert shapes_differ(a, b)
    assert not shapes_differ(a, other)
    write_start(a, b, 7, tmp_path / "starts" / "seed_7.safetensors")
    weights = load_file(tmp_path / "starts" / "seed_7.safetensors")
    small, large = (build_model(replace(cfg, seed=7)).state_dict() for cfg in (a, b))
    assert torch.equal(weights["layers.0.weight"][:3], small["layers.0.weight"])
    assert torch.equal(weights["layers.0.weight"][3:], large["layers.0.weight"][3:])
    assert torch.equal(weights["layers.2.weight"][:, :3], small["layers.2.weight"])
    assert torch.equal(weights["layers.2.bias"], small["layers.2.bias"])


def test_fewer_than_four_pairs_answer_nothing_and_say_how_many_are_missing(tmp_path: Path) -> None:
    a, b = side(tmp_path / "a", [0.5, 0.6, 0.55]), side(tmp_path / "b", [0.4, 0.5, 0.46])
    comparison = judged(a, b)
    assert comparison["answer"] == "not distinguishable yet"
    assert comparison["more_pairs"] == 1
    assert comparison["line"].endswith("3 pairs: nothing is concluded from fewer than 4")


def test_the_side_with_more_divergences_is_never_better(tmp_path: Path) -> None:
    a = side(tmp_path / "a", [0.5, 0.6, 0.55, 0.52, 0.58, 0.53])
    b = side(tmp_path / "b", [0.4, 0.5, 0.45, 0.42, 0.481, None])
    comparison = judged(a, b)
    assert (comparison["a"]["diverged"], comparison["b"]["diverged"]) == (0, 1)
    assert comparison["answer"] == "not distinguishable yet"
    assert any("more of its runs diverged" in text for text in comparison["remarks"])
    assert judged(b, a)["answer"] == "not distinguishable yet"  # A may not be the better one either
    exploded = side(tmp_path / "c", [0.4, 0.5, 0.45, 0.42, 0.481, 9.0])
    assert judged(a, exploded)["b"]["diverged"] == 1


def test_a_run_that_was_interrupted_is_no_pair(tmp_path: Path) -> None:
    a = side(tmp_path / "a", [0.5, 0.6])
    (tmp_path / "a" / "1" / "result.json").write_text(
        json.dumps({"status": "stopped", "exit_code": 130, "metrics": {"val/loss": 9.0}})
    )
    assert [run.cfg.seed for run in read_side(str(tmp_path / "a")).runs] == [0]
    (tmp_path / "a" / "0" / "result.json").unlink()
    assert ended_runs(tmp_path / "a") == []
    assert [run.cfg.seed for run in a.runs] == [0, 1]


@pytest.mark.parametrize("metric", ["val/accuracy", "val/share_of_loss"])
def test_a_tie_by_one_sample_is_called_a_tie(tmp_path: Path, metric: str) -> None:
    a = side(tmp_path / "a", [350 / 360] * 5 + [349 / 360], metric)
    b = side(tmp_path / "b", [351 / 360] * 5 + [350 / 360], metric)
    comparison = judged(a, b, metric)
    assert comparison["answer"] == "not distinguishable yet"
    assert comparison["remarks"] == [f"a tie: the means differ by one step of {metric}, 0.002778, or less"]


def test_the_clock_of_stop_after_is_said_to_be_part_of_a_difference(tmp_path: Path) -> None:
    for name, steps in (("a", 100), ("b", 120)):
        side(tmp_path / name, POOL["loss"][:5], stop_after="5s")
        for seed, path in enumerate(sorted((tmp_path / name).glob("*/result.json"))):
            path.write_text(json.dumps(json.loads(path.read_text()) | {"steps": steps + seed}))
    comparison = judged(read_side(str(tmp_path / "a")), read_side(str(tmp_path / "b")))
    assert comparison["remarks"] == [
        "other numbers of steps: 100, 101, 102, 103 and 1 more and 120, 121, 122, 123 and 1 more",
        "stop_after ends a run by the clock: the speed of each is part of the difference, with all its noise",
    ]
    assert not comparison["unpaired"]


def test_skewed_differences_are_said(tmp_path: Path) -> None:
    a = side(tmp_path / "a", [0.5, 0.6, 0.55, 0.52, 0.58])
    b = side(tmp_path / "b", [0.49, 0.591, 0.539, 0.511, 2.1])
    assert any(text.startswith("skewed: the difference 1.52") for text in judged(a, b)["remarks"])


def test_a_delta_and_a_series_of_edits_change_what_is_sure(tmp_path: Path) -> None:
    a = side(tmp_path / "a", [0.5, 0.6, 0.55, 0.52, 0.58])
    b = side(tmp_path / "b", [0.501, 0.6, 0.549, 0.52, 0.58])
    assert judged(a, b)["answer"] == "not distinguishable yet"
    assert judged(a, b, delta=0.01)["answer"] == "the same within 0.01"
    better = side(tmp_path / "c", [0.45, 0.56, 0.505, 0.475, 0.528])
    assert judged(a, better)["answer"] == "better"
    assert judged(a, better, edits=200)["answer"] == "not distinguishable yet"


def test_equal_hashes_are_the_same_bits(tmp_path: Path) -> None:
    a = side(tmp_path / "a", [0.5, 0.6])
    assert judged(a, a)["answer"] == "the same bits"


def test_a_renamed_layer_is_the_same_bits(tmp_path: Path) -> None:
    sides = [side(tmp_path / name, [0.5]) for name in "ab"]
    first, second = torch.arange(6.0), torch.ones(2, 3)
    for runs, names in zip(sides, (("body", "head"), ("zebra", "head")), strict=True):
        folder = runs.folder / "0" / "model"
        folder.mkdir()
        save_file(dict(zip(names, (first, second), strict=True)), folder / "model.safetensors")
    assert judged(sides[0], sides[1])["answer"] == "the same bits"
    save_file({"body": first + 1, "head": second}, sides[1].folder / "0" / "model" / "model.safetensors")
    assert judged(sides[0], sides[1])["answer"] == "not distinguishable yet"


@pytest.mark.slow
def test_a_pairing_with_other_samples_is_said_to_be_broken(tmp_path: Path) -> None:
    a = side(tmp_path / "a", [0.5, 0.6], loader={"shuffle": False})
    assert judged(a, side(tmp_path / "b", [0.5, 0.6]))["unpaired"] == ["another order of samples (loader.shuffle)"]


def test_a_folder_of_several_points_is_refused_and_one_of_its_runs_stands_for_its_point(tmp_path: Path) -> None:
    for name, decay in (("x", 0.0), ("y", 1.0)):
        side(tmp_path / name, [0.5, 0.6], clip={"max_norm": decay + 1})
    rows = [
        {"job": f"{name}{seed}", "folder": f"{name}/{seed}", "overrides": [], "exit_code": 0}
        for name in "xy"
        for seed in (0, 1)
    ]
    (tmp_path / "sweep.json").write_text(json.dumps({"jobs": rows}))
    with pytest.raises(ConfigError, match="holds several points"):
        read_side(str(tmp_path))


def test_comparisons_are_listed_from_the_ledger(tmp_path: Path, cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        side(tmp_path / name, [0.5, 0.6])
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(schema_of("compare")).validate(shown)
    assert main(["compare", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["comparisons"] == [shown]
    with pairs.LEDGER.open("a") as file:
        file.write(f"{json.dumps(shown | {'version': 2})}\n")
        file.write('{"version": 1, "line": "of no comparison"}\nhalf a li')
    assert main(["compare"]) == 0
    assert shown["line"] in capsys.readouterr().out
    assert main(["report", str(pairs.LEDGER)]) == 0
    page = pairs.LEDGER.with_suffix(".html")
    assert capsys.readouterr().out == f"{page}\n"
    assert "1 comparison: 1 undecided or equal. Their runs trained" in page.read_text()
    with pytest.raises(ConfigError, match="lists no comparison"):
        report.run(parse(["report", str(tmp_path / "none.jsonl")])[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optimizer.lr=1"], "Give A and B"),
        (["recipe=digits", "optimizer.lr=1", "optimizer.lr=2"], "is given for both sides, and again"),
        (["optimizer.lr=1 seed=3", "optimizer.lr=2"], "is set by compare itself"),
        (["a", "b", "optimizer.lr=2"], "takes two folders"),
        (["a", "b", "--pairs", "6"], "has no effect: the seeds are those of a"),
    ],
)
def test_words_that_name_no_two_sides_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        verb.run(parse(["compare", *arguments])[0])


def test_an_empty_side_keeps_its_place() -> None:
    assert parse(["compare", "optimizer.lr=1", "", "epochs=1"])[0].overrides == ("optimizer.lr=1", "", "epochs=1")


@pytest.mark.slow
def test_a_comment_changes_no_state_and_a_digit_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "edited_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "net.py").write_text("WIDTH = 8\n")
    data = tmp_path / "rows.csv"
    data.write_text("1")
    cfg = RunConfig(model={"_target_": "edited_package.net.Net"}, data={"_target_": "x.Y", "path": str(data)})
    before = state_of(cfg)
    (package / "net.py").write_text("# a comment\nWIDTH  =  8\n")
    assert state_of(cfg) == before
    (package / "net.py").write_text("WIDTH = 9\n")
    assert state_of(cfg).differing(before) == ["sources"]
    (package / "net.py").write_text("WIDTH = 8\n")
    os.utime(data, (0, 0))
    assert state_of(cfg).differing(before) == ["data"]
    assert state_of(RunConfig(seed=3)) == state_of(RunConfig(seed=4))
    sys.modules.pop("edited_package", None)


def test_packages_of_the_system_count_by_their_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # an environment with --system-site-packages: torch, read and parsed whole, took minutes
    package = tmp_path / "dist-packages" / "package_of_the_system"
    package.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(package.parent))
    cfg = RunConfig(model={"_target_": "package_of_the_system.Net"})
    (package / "__init__.py").write_text("WIDTH = 8\n")
    before = state_of(cfg)
    (package / "__init__.py").write_text("WIDTH = 9\n")
    assert state_of(cfg) == before


@pytest.mark.long
def test_compare_trains_what_is_missing_and_nothing_for_a_null_edit(
    cwd: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    decays = ["optimizer.weight_decay=0.1", "optimizer.weight_decay=0.01"]
    short = ["recipe=digits", "epochs=10", "callbacks=[]", "logger=[]"]
    assert main(["compare", *decays, *short]) == 0
    assert capfd.readouterr().out.splitlines()[-1].startswith("better  val/loss -0.00")
    folders = sorted(path.parent for path in Path("outputs/compare").rglob("result.json"))
    assert len(folders) == 10
    assert main(["compare", *reversed(decays), *short]) == 0  # both are known
    assert capfd.readouterr().out.splitlines()[-1].startswith("worse  val/loss 0.00")
    assert main(["compare", str(folders[0].parent), "log_every_steps=5"]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "the same"
    assert len([*Path("outputs/compare").rglob("result.json")]) == 10


@pytest.mark.slow
def test_seeds_whose_jobs_never_began_are_named(
    cwd: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sweep(call: Call) -> int:
        overrides = dict(line.split("=", 1) for line in call.overrides)
        count = 5 if overrides["optimizer.lr"] == "0.1" else 4  # of B the last one failed before it had a folder
        side(Path(overrides["hydra.sweep.dir"]), [0.5 + seed / 100 for seed in range(count)])
        return 1

    monkeypatch.setattr("trainkit.verbs.running.train.sweep", sweep)
    assert main(["compare", "optimizer.lr=0.1", "optimizer.lr=0.2", "recipe=digits", "--json"]) == 0
    comparison = json.loads(capsys.readouterr().out)
    assert len(comparison["pairs"]) == 4
    assert comparison["remarks"][0].startswith("no run of optimizer.lr=0.2 has ended with seed 4: outputs/compare/")
