"""What trainkit puts into a command itself: what it replaces, and what a printed command needs to run again."""

from pathlib import Path

import pytest

from trainkit.cli import parse
from trainkit.config.compose import compose
from trainkit.config.resume import compose_resumed
from trainkit.config.yaml_files import config_dir_arguments, with_config_dirs
from trainkit.verbs.running.prove import _command
from trainkit.verbs.running.train import expand_folds


def test_the_fold_of_each_run_replaces_what_the_person_gave() -> None:
    call, _ = parse(["cv.folds=3", "cv.fold=null"])
    assert expand_folds(call).overrides == ("cv.folds=3", "cv.fold=range(3)")


def test_resume_replaces_the_recipe_and_says_so(tmp_path: Path) -> None:
    text = "seed: 3\nrecipe: digits\n"
    (tmp_path / "resolved.yaml").write_text(text)
    composed = compose_resumed(tmp_path, ["recipe=shakespeare", "quiet=true"])
    assert composed.overrides == ("quiet=true", "recipe=null")
    assert composed.problems == ()
    assert "recipe=shakespeare has no effect: the run keeps what its own recipe set" in composed.notes


def test_a_command_that_composes_anew_names_the_folders_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my conf").mkdir()
    call, _ = parse(["prove", "strategy=mirrored", "--config-dir", "my conf", "--config-dir=/srv/conf", "--steps", "3"])
    told = "trainkit prove --config-dir 'my conf' --config-dir /srv/conf strategy=mirrored --steps 3"
    assert _command(call) == told
    with with_config_dirs(call.config_dirs):
        assert config_dir_arguments() == ["--config-dir", "my conf", "--config-dir", "/srv/conf"]
    assert config_dir_arguments() == []


def test_a_folder_outside_of_the_current_one_is_named_in_full(tmp_path: Path) -> None:
    assert config_dir_arguments([tmp_path]) == ["--config-dir", str(tmp_path)]
    assert config_dir_arguments([Path.cwd() / "conf"]) == ["--config-dir", "conf"]


def test_python_refuses_a_key_given_twice_too() -> None:
    (problem,) = compose(["seed=1", "seed=2"]).problems
    assert str(problem) == "seed: is given twice: seed=1 and seed=2. Give it once. (command line)"
