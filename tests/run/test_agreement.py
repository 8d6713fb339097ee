from pathlib import Path

import trainkit
from trainkit.strategies.groups.process_group import LocalCollective
from trainkit.trainer.loop import StopSaveConsensus, StopSaveDecision
from trainkit.trainer.manifest import list_complete

QUIET = ("recipe=null", "steps=200", "callbacks=[]", "logger=[]", "eval.every_epochs=null", "checkpoint.keep_last=99")


def test_one_process_agrees_with_itself() -> None:
    assert StopSaveConsensus(LocalCollective(), lambda: None).ask() == StopSaveDecision(stop=None, save=False)
    assert StopSaveConsensus(LocalCollective(), lambda: "resized", lambda: True).ask() == StopSaveDecision(
        stop="resized", save=True
    )


def test_the_questions_come_half_a_second_apart_at_most_twice_as_many_steps() -> None:
    agreement, intervals = StopSaveConsensus(LocalCollective(), lambda: None), []
    for _ in range(4):
        agreement.ask()
        intervals.append(agreement.interval)
    assert intervals == [2, 4, 8, 16]


def saved_steps(folder: Path, *overrides: str) -> int:
    trainkit.train(trainkit.compose([*QUIET, *overrides]), run_dir=folder)
    return len(list_complete(folder / "checkpoints"))


def test_a_run_saves_when_its_time_has_come(tmp_path: Path) -> None:
    assert saved_steps(tmp_path / "by_time", "checkpoint.every_s=1e-9") > 2
    assert saved_steps(tmp_path / "at_the_end", "checkpoint.every_s=null") == 1
