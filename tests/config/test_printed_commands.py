"""A printed command that names another folder or value when it is pasted into a shell is caught here alone."""

import shlex
import subprocess
from pathlib import Path

from trainkit.config.commands import printed_command, shell_word
from trainkit.config.compose import compose
from trainkit.config.grammar import setting
from trainkit.config.yaml_files import config_dir_arguments, with_config_dirs
from trainkit.verbs.support.call import parse


def test_a_command_that_composes_anew_names_the_folders_of_the_user(cwd: Path) -> None:
    (cwd / "my conf").mkdir()
    call, _ = parse(["prove", "strategy=mirrored", "--config-dir", "my conf", "--config-dir=/srv/conf", "--steps", "3"])
    told = "trainkit prove --config-dir 'my conf' --config-dir /srv/conf strategy=mirrored --steps 3"
    assert call.command == told
    with with_config_dirs(call.config_dirs):
        assert config_dir_arguments() == ["--config-dir", "my conf", "--config-dir", "/srv/conf"]
    assert config_dir_arguments() == []
    assert config_dir_arguments([cwd.parent, cwd / "conf"]) == ["--config-dir", str(cwd.parent), "--config-dir", "conf"]


NAMES = ("lr=0.1", "my run", "it's", "läufe", "[a,b]", "$x", "~home", "#1", "-dash", 'q"uote', "back\\slash\\", "{b}")
WORDS = (*NAMES, "=", "null", "True", "1e5", "nan", "", "a: b", "a,b", "out/lr=0.1", '\\"', "'", " ", "mlp-2")


def test_a_printed_command_names_its_folder_for_the_shell_and_for_the_command_line(cwd: Path) -> None:
    for name in NAMES:
        Path(name).mkdir()
    commands = [printed_command(verb, [Path(name), "k=1"]) for name in NAMES for verb in ("resume", "top")]
    bash = "".join(f'printf "%s\\0" {command}\nprintf "\\n"\n' for command in commands)
    done = subprocess.run(["bash", "-c", bash], capture_output=True, text=True, check=True)
    for place, line in enumerate(done.stdout.splitlines()):
        call, _ = parse(line.split("\0")[1:-1])
        assert (call.verb, call.overrides) == (("resume", "top")[place % 2], ("k=1",))
        assert Path(call.arguments[0]).expanduser().samefile(cwd / NAMES[place // 2])


def test_a_setting_is_read_back_as_the_same_text() -> None:
    for text in WORDS:
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


def test_a_printed_command_refers_to_a_variable_in_place_of_a_secret() -> None:
    call, _ = parse(["bench", "model.width=1,2", "logger.wandb.api_key=k7k7k7k7", "--steps", "2"])
    key = "'logger.wandb.api_key=${oc.env:WANDB_API_KEY}'"
    assert call.command == f"trainkit bench model.width=1,2 {key} --steps 2"
