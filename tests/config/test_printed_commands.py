"""What trainkit puts into a command itself: what it replaces, and what a printed command needs to run again."""

import shlex
import subprocess
from pathlib import Path

import pytest

from trainkit.cli import main, parse
from trainkit.config.commands import printed_command, shell_word
from trainkit.config.compose import compose
from trainkit.config.grammar import setting
from trainkit.config.resume import compose_resumed
from trainkit.config.yaml_files import config_dir_arguments, with_config_dirs
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
    assert call.command == told
    with with_config_dirs(call.config_dirs):
        assert config_dir_arguments() == ["--config-dir", "my conf", "--config-dir", "/srv/conf"]
    assert config_dir_arguments() == []


def test_a_folder_outside_of_the_current_one_is_named_in_full(tmp_path: Path) -> None:
    assert config_dir_arguments([tmp_path]) == ["--config-dir", str(tmp_path)]
    assert config_dir_arguments([Path.cwd() / "conf"]) == ["--config-dir", "conf"]


def test_python_refuses_a_key_given_twice_too() -> None:
    (problem,) = compose(["seed=1", "seed=2"]).problems
    assert str(problem) == "seed: is given twice: seed=1 and seed=2. Give it once. (command line)"


NAMES = (
    "lr=0.1",
    "my run",
    "it's",
    "läufe",
    "[a,b]",
    "$x",
    "~home",
    "#1",
    "-dash",
    'q"uote',
    "back\\slash\\",
    "{b}",
    "=",
)
WORDS = (*NAMES, "null", "True", "1e5", "nan", "", "a: b", "a,b", "out/lr=0.1", '\\"', "'", " ", "mlp-2")


@pytest.mark.parametrize("name", NAMES)
def test_a_printed_command_names_its_folder_for_the_shell_and_for_the_command_line(name: str, cwd: Path) -> None:
    Path(name).mkdir()
    for verb in ("resume", "evaluate", "predict", "report", "top", "ls"):
        bash = ["bash", "-c", f'printf "%s\\0" {printed_command(verb, [Path(name), "k=1"])}']
        words = subprocess.run(bash, capture_output=True, text=True, check=True).stdout.split("\0")[1:-1]
        call, _ = parse(words)
        assert (call.verb, call.overrides) == (verb, ("k=1",))
        assert Path(call.arguments[0]).expanduser().samefile(cwd / name)


@pytest.mark.parametrize("text", WORDS)
def test_a_setting_is_read_back_as_the_same_text(text: str) -> None:
    (argument,) = shlex.split(shell_word(setting("data.path", text)))
    composed = compose(["recipe=null", "data=image_folder", argument, setting("data.x", ["a", {"b": text}])])
    assert composed.values["data"]["path"] == (str(Path.cwd() / text) if text == "~home" else text)
    assert composed.values["data"]["x"] == ["a", {"b": text}]


def test_a_word_with_an_equals_sign_is_a_path_where_one_is_missing_and_exists(cwd: Path) -> None:
    Path("out/lr=0.1").mkdir(parents=True)
    Path("seed=1").mkdir()
    found = {
        ("resume", "out/lr=0.1", "seed=1"): (("out/lr=0.1",), ("seed=1",)),
        ("evaluate", "seed=1", "seed=1"): (("seed=1",), ("seed=1",)),
        ("report", "seed=1", "out/lr=0.1"): (("seed=1", "out/lr=0.1"), ()),
        ("diff", "seed=1", "out/lr=0.1"): (("seed=1", "out/lr=0.1"), ()),
        ("resume", "./no=1", "seed=1"): (("./no=1",), ("seed=1",)),
        ("resume", "--", "no=1"): (("no=1",), ()),
        ("train", "seed=1"): ((), ("seed=1",)),
    }
    for words, expected in found.items():
        call, _ = parse(words)
        assert (call.arguments, call.overrides) == expected


def test_an_absent_path_with_an_equals_sign_is_told_how_to_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", "out/lr=0.1"]) == 2
    text = "takes 1 argument, and got none. See trainkit resume --help. A path with = in it begins with / or ./."
    assert text in capsys.readouterr().err


def test_the_flags_of_a_verb_may_stand_before_it() -> None:
    for words in (["--k", "1", "top", "sweep"], ["--json", "top", "--k=1", "sweep"], ["-cd", "top", "top", "sweep"]):
        call, _ = parse(words)
        assert (call.verb, call.arguments) == ("top", ("sweep",))
    call, _ = parse(["--prompt", "plan", "generate", "export"])
    assert (call.verb, call.arguments, call.flags) == ("generate", ("export",), {"prompt": "plan"})


def test_a_printed_command_refers_to_a_variable_in_place_of_a_secret() -> None:
    call, _ = parse(["bench", "model.width=1,2", "logger.wandb.api_key=k7k7k7k7", "--steps", "2"])
    key = "'logger.wandb.api_key=${oc.env:WANDB_API_KEY}'"
    assert call.command == f"trainkit bench model.width=1,2 {key} --steps 2"
