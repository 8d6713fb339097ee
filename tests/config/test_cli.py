"""A verb taken for a value, a completion without a user's own choices, a torch imported for help: caught here alone.

A printed command that names another folder or value when it is pasted into a shell is caught here alone.
A printed command that fails when it is pasted, as it lacks a folder or package of the user, is caught here alone.
An argument that recurses, allocates without end or writes outside of its folder is caught here alone: code 2.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.config.conftest import Write
from tests.launchers.joining import free_port
from tests.support import quick
from tests.support.refusing import Refuse, refused
from tests.support.results import result_of
from trainkit import __version__
from trainkit.cli import main
from trainkit.config.commands import printed_command, shell_word
from trainkit.config.compose import compose
from trainkit.config.grammar import setting
from trainkit.config.yaml_files import config_dir_arguments, with_config_dirs
from trainkit.errors import Problem
from trainkit.verbs.support.call import parse
from trainkit.verbs.support.table import VERBS


def test_a_line_is_split_into_verb_arguments_flags_and_overrides() -> None:
    call, flags = parse(["seed=3"])
    assert (call.verb, call.overrides, flags) == ("train", ("seed=3",), {})
    for flag in (["--config-dir", "."], ["--config-dir=."], ["-cd", "."]):
        for line in (["diff", "a", "b", *flag], [*flag, "diff", "a", "b"]):
            call, _ = parse(line)
            assert (call.verb, call.arguments, len(call.config_dirs)) == ("diff", ("a", "b"), 1)
    assert parse(["--allow-package", "a,b", "--allow-package", "c"])[0].packages == ("a", "b", "c")
    assert parse(["~recipe", "+x=1", "++y.z=2"])[0].overrides == ("~recipe", "+x=1", "++y.z=2")


def test_all_mistakes_are_reported_together() -> None:
    problems = refused(parse, ["epohs=3", "--nope", "--config-dir"])
    assert [problem.partition(":")[0].partition("=")[0] for problem in problems] == ["--config-dir", "--nope", "epohs"]
    problems = refused(parse, ["--mode", "best", "top", "sweep", "--k=0", "--json=3", "--metrc", "--metric"])
    assert [problem.partition(". ")[0] for problem in problems] == [
        "--mode=best: must be min or max",
        "--k=0: must be a whole number, 1 to 1,000,000,000",
        "--json=3: --json takes no value",
        "--metric: needs a value: --metric NAME",
        "--metrc: no such flag",
    ]


def test_help_shows_the_grammar_and_every_verb_and_each_has_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["seed=3", "--help"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: trainkit [VERB] [ARGUMENTS] [--flags] OVERRIDES\n")
    assert all(f"\n  {verb} " in printed for verb in VERBS)
    for verb in VERBS:
        assert main([verb, "--help"]) == 0
        assert capsys.readouterr().out.startswith(f"usage: trainkit {verb} ")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"trainkit {__version__}\n"


def test_ls_lists_groups_choices_and_a_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls"]) == 0
    assert "\nschedule   constant, cosine, inverse_sqrt, linear, step, warmup_stable_decay\n" in capsys.readouterr().out
    assert main(["ls", "schedule"]) == 0
    assert "linear               A straight line from the peak to end\n" in capsys.readouterr().out
    assert main(["ls", "schedule", "linear"]) == 0
    text = "_target_: trainkit.schedules.Linear\n# Defaults of trainkit.schedules.Linear\nend: 0.0\n"
    assert text in capsys.readouterr().out


def test_ls_goes_on_past_a_broken_file(write_conf: Write, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_conf({"model/broken.yaml": "a: [\n", "model/mine.yaml": "# My own\nwidth: 3\n"})
    assert main(["ls", "model", "--config-dir", str(folder)]) == 0
    printed = capsys.readouterr()
    assert "mine" in printed.out
    assert "My own" in printed.out
    assert "broken.yaml: is not YAML" in printed.err


def test_explain_shows_value_origin_meaning_and_tag_and_a_group_key_by_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "schedule.end", "recipe=null", "schedule.end=0.1"]) == 0
    assert capsys.readouterr().out == (
        "schedule.end=0.1\n"
        "  set by   command line\n"
        "  type     a number, at least 0\n"
        "  unit     a plain number\n"
        "  default  0.0\n"
        "  means    Factor where the curve would arrive after the last step.\n"
        "  changes  maths: changes the result\n"
    )
    assert main(["explain", "data.target", "recipe=null", "data=csv_table"]) == 0
    assert "\n  default  none: it must be given\n" in capsys.readouterr().out
    assert main(["explain", "clip", "recipe=null"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split()[:2] == ["clip.max_norm", "null"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--config-dir conf model=mi", ["model=mine"]),
        ("plan --config-dir=conf model=mine model.wi", ["model.width="]),
        ("-cd 'my conf' model=ot", ["model=other"]),
        ("--config-dir con", []),
        ("--config-dir absent model=ml", ["model=mlp"]),
    ],
)
def test_completion_through_the_shells_variable_lists_the_users_own_choices(
    cwd: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, expected: list[str]
) -> None:
    for name in ("conf/model/mine.yaml", "my conf/model/other.yaml"):
        (cwd / name).parent.mkdir(parents=True, exist_ok=True)
        (cwd / name).write_text("_target_: mypkg.Net\nwidth: 4\n")
    monkeypatch.setenv("COMP_LINE", f"trainkit {line}")
    assert main(["-sc", "query=bash"]) == 0
    assert capsys.readouterr().out.splitlines() == expected


def test_what_answers_at_once_imports_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from trainkit.cli import main\n"
        "given = (['--help'], ['ls'], ['epohs=3'], ['-m', 'epohs=3'], ['plann'], ['model._target_=torch.os.system'], \n"
        "    ['plan', 'epohs=3'], ['prove', '--steps', '0'])\n"
        "codes = [main(arguments) for arguments in given]\n"
        "heavy = [name for name in ('torch', 'numpy', 'rich', 'matplotlib') if name in sys.modules]\n"
        "sys.exit(0 if codes == [0, 0, *[2] * 6] and not heavy else f'{codes} {heavy}')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    command = f"set -o pipefail; {sys.executable} -m trainkit --help | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (0, "usage: trainkit [VERB] [ARGUMENTS] [--flags] OVERRIDES\n")


def test_a_command_that_composes_anew_names_the_folders_of_the_user(cwd: Path) -> None:
    (cwd / "my conf").mkdir()
    call, _ = parse(["prove", "strategy=mirrored", "--config-dir", "my conf", "--config-dir=/srv/conf", "--steps", "3"])
    assert call.command == "trainkit prove --config-dir 'my conf' --config-dir /srv/conf strategy=mirrored --steps 3"
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
    for index, line in enumerate(done.stdout.splitlines()):
        call, _ = parse(line.split("\0")[1:-1])
        assert (call.verb, call.overrides) == (("resume", "top")[index % 2], ("k=1",))
        assert Path(call.arguments[0]).expanduser().samefile(cwd / NAMES[index // 2])


@pytest.mark.slow
def test_a_setting_is_read_back_as_the_same_text() -> None:
    for text in WORDS:
        (argument,) = shlex.split(shell_word(setting("data.path", text)))
        composed = compose(["recipe=null", "data=image_folder", argument, setting("data.x", ["a", {"b": text}])])
        assert composed.values["data"]["path"] == (str(Path.cwd() / text) if text == "~home" else text)
        assert composed.values["data"]["x"] == ["a", {"b": text}]


def test_a_word_with_an_equals_sign_is_a_path_where_one_is_missing_and_exists(cwd: Path) -> None:
    Path("out/lr=0.1").mkdir(parents=True)
    Path("seed=1").mkdir()
    cases = {
        ("resume", "out/lr=0.1", "seed=1"): (("out/lr=0.1",), ("seed=1",)),
        ("evaluate", "seed=1", "seed=1"): (("seed=1",), ("seed=1",)),
        ("report", "seed=1", "out/lr=0.1"): (("seed=1", "out/lr=0.1"), ()),
        ("diff", "seed=1", "out/lr=0.1"): (("seed=1", "out/lr=0.1"), ()),
        ("resume", "./no=1", "seed=1"): (("./no=1",), ("seed=1",)),
        ("resume", "--", "no=1"): (("no=1",), ()),
        ("train", "seed=1"): ((), ("seed=1",)),
    }
    for arguments, expected in cases.items():
        call, _ = parse(arguments)
        assert (call.arguments, call.overrides) == expected


def test_a_printed_command_refers_to_a_variable_in_place_of_a_secret() -> None:
    call, _ = parse(["bench", "model.width=1,2", "logger.wandb.api_key=k7k7k7k7", "--steps", "2"])
    key = "'logger.wandb.api_key=${oc.env:WANDB_API_KEY}'"
    assert call.command == f"trainkit bench model.width=1,2 {key} --steps 2"


PACKAGE = """\
from torch import nn

class Net(nn.Sequential):
    def __init__(self, width: int = 4, drop: float = 0.0) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, width), nn.Dropout(drop), nn.ReLU(), nn.Linear(width, 10))
"""
OWN = ("--config-dir", "conf", "--allow-package", "test_pasted_nets")
RUN = ("recipe=null", "model=own", "steps=8", "batch.micro_size=32", "callbacks=[]", "logger=[]")


@pytest.fixture
def project(cwd: Path) -> Path:
    """The current folder, with a package, `model=own` and a choice `strategy=pair` of the user's."""
    (cwd / "test_pasted_nets.py").write_text(PACKAGE)
    for name, text in {
        "model/own": "_target_: test_pasted_nets.Net\nwidth: 4\ndrop: 0.0\n",
        "strategy/pair": "_target_: trainkit.strategies.Mirrored\nreplicas: 2\n",
    }.items():
        (cwd / f"conf/{name}.yaml").parent.mkdir(parents=True, exist_ok=True)
        (cwd / f"conf/{name}.yaml").write_text(text)
    return cwd


def ran(*arguments: str, code: int = 0) -> str:
    """What `trainkit` prints with these arguments."""
    done = subprocess.run(quick.command(*arguments), capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def pasted(command: str, *more: str) -> str:
    """What a printed command prints."""
    program, *arguments = shlex.split(command)
    assert program == "trainkit"
    return ran(*arguments, *more)


def printed_after(name: str, text: str) -> str:
    """The rest of the one line that begins with a name."""
    (line,) = [line.strip() for line in text.splitlines() if line.strip().startswith(name)]
    return line.removeprefix(name).strip()


def test_a_stopped_run_resumes_by_its_printed_command_with_choices_of_the_user(project: Path) -> None:
    for strategy in ("one_device", "pair"):
        folder = project / strategy
        text = ran(*OWN, *RUN, f"strategy={strategy}", "stop_at_step=4", f"hydra.run.dir={strategy}")
        command = printed_after("resume ", text)
        assert command == result_of(folder)["resume"]
        assert command == f"trainkit resume --config-dir conf --allow-package test_pasted_nets {strategy}"
        pasted(command, "strategy=pair")
        assert result_of(folder)["steps"] == 8


def test_a_task_started_by_hand_prints_its_rank_and_log(project: Path) -> None:
    workers = ",".join(f"'127.0.0.1:{free_port()}'" for _ in range(2))
    spec = ("cluster=spec", f"cluster.worker=[{workers}]", "strategy=multi_worker_mirrored", "hydra.run.dir=run")
    tasks = [quick.command(*OWN, *RUN, *spec, f"cluster.task=worker:{index}") for index in range(2)]
    started = [subprocess.Popen(task, stderr=subprocess.PIPE, text=True) for task in tasks]
    _, text = (process.communicate(timeout=120)[1] for process in started)
    assert [process.returncode for process in started] == [0, 0], text
    assert "launch by cluster=spec: rank 1 of 2 on one host" in text
    assert "worker:1, rank 1 of 2: its output goes to run/logs/rank_1.log\n" in text
    assert (project / "run/logs/rank_1.log").exists()


@pytest.mark.slow
def test_a_service_may_close_the_standard_streams(tmp_path: Path) -> None:
    command = ["sh", "-c", 'exec "$0" -m trainkit ls <&- >&- 2>&-', sys.executable]
    assert subprocess.run(command, cwd=tmp_path, timeout=60, check=False).returncode == 0


@pytest.mark.slow
def test_a_broken_torch_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    done = subprocess.run(
        [sys.executable, "-m", "trainkit", "recipe=digits", "hydra.run.dir=run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == ("torch cannot be imported: ImportError: libcudart.so.12: cannot open shared object file.\n")


def test_a_folder_with_a_name_that_is_not_utf_8_is_refused(tmp_path: Path, refuse: Refuse) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    (problem,) = refuse("recipe=digits", f"hydra.run.dir='{folder}'")
    assert "bytes in its whole path that are not UTF-8" in problem


@pytest.mark.parametrize("setting", ["devices=[]", "devices=[[]]", "devices=[cpu,[cpu]]", "devices={a:1}", "map={}"])
def test_devices_that_make_up_no_replica_are_refused_by_their_key(setting: str, refuse: Refuse) -> None:
    (problem,) = refuse("recipe=digits", "strategy=mirrored", f"strategy.{setting}")
    assert problem.startswith(f"strategy.{setting.partition('=')[0]}=")


LONG = "has a name of 300 bytes; a file system takes 255 at most."


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (("name='a\x1b[31m'",), "name=a\\x1b[31m: may hold letters, digits,"),
        (("steps=9999999999999999999999",), "steps=9999999999999999999999: must fit into 64 bits"),
        (("seed=9999999999999999999999",), "seed=9999999999999999999999: must be at least 0 and less than 9223"),
        (("hydra.run.dir=" + "x" * 300,), str(Problem(key="hydra.run.dir", value="x" * 300, rule=LONG))),
        (
            ("strategy=pipeline", "strategy.replicas=1000", "strategy.stages=1000"),
            "strategy.replicas=1000: 1000 replicas of 1000 ranks need 1000000 devices",
        ),
        (("model.hidden=[4000000000000,4000000000000]",), "model: has a parameter that is larger than any memory"),
        (("+seed=1", "seed=2"), "seed: is given twice: +seed=1 and seed=2."),
        (("batch={micro_size: 3}", "batch.micro_size=4"), "batch.micro_size: is given twice: batch={micro_size: 3} "),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_an_argument_without_bound_is_refused_on_one_screen(
    refuse: Refuse, arguments: tuple[str, ...], start: str
) -> None:
    problems = refuse("plan", "recipe=null", *arguments)
    assert max(map(len, problems)) < 1500
    assert problems[0].startswith(start)
    assert len(problems) == 1


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (("seed=range(1000000000)",), "seed=range(1000000000): lists about 1,000,000,000 values, and 10,000 is"),
        (("seed=range(5000)", "epochs=range(1,5001)"), "-m: makes 25,000,000 points of all keys together"),
        (("hydra/sweeper=random", "sweep.trials=10001", "seed=interval(0,10)"), "sweep.trials=10001: must be 10,000"),
    ],
)
def test_a_sweep_without_number_is_refused_before_it_is_counted_out(
    refuse: Refuse, arguments: tuple[str, ...], start: str
) -> None:
    (problem,) = refuse("-m", "recipe=null", *arguments)
    assert problem.startswith(start)


@pytest.mark.slow
def test_the_folder_of_a_job_lies_in_that_of_its_sweep(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "seed=1,2", "epochs=1", "hydra.sweep.dir=sweep", "hydra.sweep.subdir=../x"]) == 2
    assert "  hydra.sweep.subdir=../x: is outside the folder of the sweep" in capsys.readouterr().err
    assert not (cwd / "x").exists()
