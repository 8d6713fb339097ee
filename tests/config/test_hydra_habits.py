"""A habit of Hydra's command line that is ignored, or answered in Hydra's raw words, is caught here alone."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from trainkit.cli import main
from trainkit.config.compose import compose, jobs
from trainkit.config.resume import compose_resumed
from trainkit.run import runner

WORKS = [
    "~callbacks",
    "~recipe=digits",
    "~callbacks.progress",
    "+callbacks=[profiler]",
    "callbacks={}",
    "++optimizer.lr=0.1",
    "+seed=3",
    "hydra.verbose=true",
    "hydra.job.name=x",
    "+hydra.job.env_set.X=1",
    "++hydra.run.dir=out",
    "hydra.run={dir: out}",
    "--cfg job",
    "-m seed=1,2 ++hydra.sweep.dir=out",
    "--multirun seed=1,2 hydra/launcher=basic hydra/sweeper=basic",
]
REFUSED = {
    "~callbacks=[progress]": "~callbacks=[progress]: removes all callbacks, without a value.",
    "~recipe=shakespeare": "~recipe=shakespeare: is not the choice of this group",
    "~model": "model=null: needs a choice.",
    "~seed": "~seed: belongs to every run and cannot be deleted.",
    "~optimizer.lr=3": "~optimizer.lr=3: is not deleted: its value is 0.01.",
    "~nosuch": "~nosuch: there is no such key to delete.",
    "+precision=bf16": "precision=bf16: is a group: write precision=bf16.",
    "+nosuch=1": "nosuch: no such key.",
    "model@x=mlp": "model@x=mlp: takes no @package",
    "recipe@x=digits": "recipe@x=digits: takes no @package",
    "seed@x=1": "seed@x=1: seed is not a group, so it takes no @package.",
    "loader={}": "loader={}: belongs to every run and cannot be cleared.",
    "hydra={}": "hydra={}: is the node of Hydra itself.",
    "++hydra.job.nosuch=1": "hydra.job.nosuch=1: is no key of Hydra.",
    "~hydra.run.dir": "~hydra.run.dir: belongs to Hydra and cannot be deleted.",
    "hydra.run.dir=a,b": "hydra.run.dir=a,b: is a list of choices.",
    "-m seed=1,2 hydra.job.chdir=true": "hydra.job.chdir=true: is not supported",
    "hydra.searchpath=[conf]": "hydra.searchpath=['conf']: is not read.",
    "+hydra/launcher=basic": "hydra/launcher=basic: has no effect without -m.",
    "-m ++hydra.run.dir=out": "hydra.run.dir=out: is the folder of a single run.",
    "-m hydra.mode=RUN": "hydra.mode=RUN: has no effect with -m.",
    "--config-name=other": "--config-name=other: is Hydra's, and not needed here",
    "-cp conf": "-cp: is Hydra's, and not needed here",
    "--cfg job resume RUN": "--cfg: prints what key=value compose, and not RUN.",
}


@pytest.fixture
def code(cwd: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command line up to the start of the training, and returns the exit code."""
    monkeypatch.setattr(runner, "train_composition", lambda *_, **__: {"status": "finished"})
    monkeypatch.setattr(jobs, "multirun", lambda *_, **__: [])

    def run(line: str) -> int:
        words = [line] if "{" in line and not line.startswith("-") else line.split(" ")
        return main(words)

    return run


@pytest.mark.parametrize("line", WORKS)
def test_a_habit_works(line: str, code: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert code(line) == 0, capsys.readouterr().err


@pytest.mark.parametrize("line", REFUSED)
def test_a_habit_is_refused_in_our_words(line: str, code: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert code(line) == 2
    printed = capsys.readouterr().err
    assert f"\n  {REFUSED[line]}" in printed
    assert "defaults list:" not in printed
    assert "Could not" not in printed


def test_a_habit_changes_the_callbacks_of_a_run_and_of_a_resumed_run(tmp_path: Path) -> None:
    values = compose(["callbacks=[early_stop,plots]"]).values
    (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(values))
    for line, names in (
        ("~callbacks", []),
        ("~callbacks.plots", ["early_stop"]),
        ("+callbacks=profiler", ["early_stop", "plots", "profiler"]),
        ("callbacks=[progress]", ["progress"]),
    ):
        assert sorted(compose_resumed(tmp_path, [line]).values["callbacks"]) == names
    assert compose(["+callbacks=progress"]).choices["callbacks"] == ["progress", "plots"]
    assert compose(["hydra/launcher='basic'"]).launcher == "basic"
