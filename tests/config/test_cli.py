"""A verb taken for a value, a completion without a user's own choices, a torch imported for help: caught here alone."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.config.conftest import Write
from trainkit import __version__
from trainkit.cli import main
from trainkit.errors import ConfigError
from trainkit.verbs.starting.completion import candidates
from trainkit.verbs.support.call import VERBS, parse


def test_a_line_is_split_into_verb_arguments_flags_and_overrides() -> None:
    call, flags = parse(["seed=3"])
    assert (call.verb, call.overrides, flags) == ("train", ("seed=3",), {})
    for flag in (["--config-dir", "."], ["--config-dir=."], ["-cd", "."]):
        for line in (["diff", "a", "b", *flag], [*flag, "diff", "a", "b"]):
            call, _ = parse(line)
            assert (call.verb, call.arguments, len(call.config_dirs)) == ("diff", ("a", "b"), 1)
    assert parse(["--allow-package", "a,b", "--allow-package", "c"])[0].packages == ("a", "b", "c")
    assert parse(["~recipe", "+x=1", "++y.z=2"])[0].overrides == ("~recipe", "+x=1", "++y.z=2")


def test_the_flags_of_a_verb_may_stand_before_it() -> None:
    for words in (["--k", "1", "top", "sweep"], ["--json", "top", "--k=1", "sweep"], ["-cd", "top", "top", "sweep"]):
        call, _ = parse(words)
        assert (call.verb, call.arguments) == ("top", ("sweep",))
    call, _ = parse(["--prompt", "plan", "generate", "export"])
    assert (call.verb, call.arguments, call.flags) == ("generate", ("export",), {"prompt": "plan"})


def test_all_mistakes_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(["--nope", "--config-dir"])
    assert [problem.key for problem in caught.value.problems] == ["--config-dir", "--nope"]
    with pytest.raises(ConfigError) as caught:
        parse(["--mode", "best", "top", "sweep", "--k=0", "--json=3", "--metrc", "--metric"])
    assert [str(problem).partition(". ")[0] for problem in caught.value.problems] == [
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
    assert "_target_: trainkit.schedules.Linear\nend: 0.0\n" in capsys.readouterr().out


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


def test_the_composed_config_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cfg", "job", "recipe=null", "seed=3"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["seed"] == 3
    assert main(["recipe=null", "--cfg", "hydra"]) == 0
    assert "run:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("trainkit pl", ["plan"]),
        ("trainkit plan schedule=lin", ["schedule=linear"]),
        ("trainkit recipe=null optimizer.l", ["optimizer.lr="]),
        ("trainkit recipe=null strategy=mirrored strategy.rep", ["strategy.replicas="]),
        ("trainkit --multi", ["--multirun"]),
        ("trainkit emit sl", ["slurm"]),
        ("trainkit emit slurm --he", ["--head", "--help"]),
    ],
)
def test_completion_lists_verbs_choices_keys_and_flags(line: str, expected: list[str]) -> None:
    assert candidates(line, parse([])[0]) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--config-dir conf model=mi", ["model=mine"]),
        ("plan --config-dir=conf model=mine model.wi", ["model.width="]),
        ("-cd 'my conf' model=ot", ["model=other"]),
        ("--config-dir con", []),
        ("--config-dir absent model=ml", ["model=mlp"]),
    ],
)
def test_completion_through_the_shells_variable_lists_the_users_own_choices(
    cwd: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, expected: list[str]
) -> None:
    for name in ("conf/model/mine.yaml", "my conf/model/other.yaml"):
        (cwd / name).parent.mkdir(parents=True, exist_ok=True)
        (cwd / name).write_text("_target_: mypkg.Net\nwidth: 4\n")
    monkeypatch.setenv("COMP_LINE", f"trainkit {words}")
    assert main(["-sc", "query=bash"]) == 0
    assert capsys.readouterr().out.splitlines() == expected


def test_what_answers_at_once_imports_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from trainkit.cli import main\n"
        "given = (['--help'], ['ls'], ['recipe=null', 'epohs=3'], ['plann'], ['model._target_=torch.os.system'])\n"
        "codes = [main(arguments) for arguments in given]\n"
        "heavy = [name for name in ('torch', 'numpy', 'rich', 'matplotlib') if name in sys.modules]\n"
        "sys.exit(0 if codes == [0, 0, 2, 2, 2] and not heavy else f'{codes} {heavy}')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    command = f"set -o pipefail; {sys.executable} -m trainkit --help | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (0, "usage: trainkit [VERB] [ARGUMENTS] [--flags] OVERRIDES\n")
