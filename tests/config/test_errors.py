"""A rule between keys that is skipped, or that blames another key or line, is caught here alone.

Each bad config is refused by its key, with the word that helps; `refuse` sees to it that nothing is left behind.
An error of another process that arrives without its problems or its exit code is caught here alone.
A key that names an absent file, and is found out only when the data is read, is caught here alone.
A habit of Hydra's command line that is ignored, or answered in Hydra's raw words, is caught here alone.
A map that leaves a module without a device, or a plan that counts its memory twice, is caught here alone.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.config.conftest import Write
from tests.support.refusing import Refuse
from trainkit.cli import main
from trainkit.config.check import checked
from trainkit.config.compose import compose, jobs
from trainkit.config.resume import compose_resumed
from trainkit.config.targets.choices import read_choice
from trainkit.config.yaml_files import shipped_conf
from trainkit.errors import MISSING, ConfigError, MissingExtraError, PeerError, Problem, TrainkitError
from trainkit.fields import Reads, a_file, a_folder
from trainkit.run import runner

ARGUMENTS = {
    "epohs=3": "epohs: no such key. Did you mean epochs?",
    "global_size=3": "global_size: no such key. Did you mean batch.global_size?",
    "clip.xyz=3": "clip.xyz: no such key in clip. There are: max_norm.",
    "qqq=3": "qqq: no such key. `trainkit ls`",
    "optimizer.params=[1]": "optimizer.params: is set by trainkit",
    "callbacks.foo.x=1": "callbacks.foo: no such choice",
    "callbacks.early_stop.patience=3": "callbacks.early_stop: is not among the chosen callbacks",
    "schedule=cosin": "schedule=cosin: no such choice. Did you mean cosine? There are: constant, cosine,",
    "strategy=[one_device,mirrored]": "strategy=[one_device,mirrored]: takes one choice, not a list.",
    "seed=-1": "seed=-1: must be at least 0 and less than 9223372036854775808.",
    "numerics.lanes=6": "numerics.lanes=6: must be a power of two. Use 4 or 8.",
    "name=a/b": "name=a/b: may hold letters, digits,",
    "clip=3": "clip=3: has its own keys: clip.max_norm.",
    "optimizer.lr=null": "optimizer.lr: is missing: the base learning rate.",
    "optimizer.foreach=true": "optimizer.foreach=true: fused and foreach",
    "optimizer.groups.no_decay.weight_dcay=0": "optimizer.groups.no_decay.weight_dcay: no such key of the optimizer.",
    "eval.mode=max": "eval.mode=max: has no effect without eval.metric.",
    "loader.num_workers=2": "loader.num_workers=2: has no effect: the dataset is in memory.",
    "supervisor.max_restarts=1": "supervisor.max_restarts=1: has no effect: this strategy runs in one process.",
    "epochs=null": "epochs: a run needs a length.",
    "model._target_=Mlp": "model._target_=Mlp: must name a class or function with its module",
    "init_from=${batch.size}": "init_from=${batch.size}: refers to batch.size, and there is no such key.",
    "data.path=~/x": "data.path=~/x: has a character that needs quotes. Write 'data.path=\"~/x\"'",
    "data.scaling=???": "data.scaling: needs a value",
    "-m hydra.sweep.dir=/dev/null/x": "hydra.sweep.dir=/dev/null/x: /dev/null is no folder.",
    "-m seed=range(5,1)": "seed=range(5,1): is an empty sweep",
    "epochs=3 steps=5": "steps=5: sets the same as epochs, set at the same place.",
    "batch.global_size=8 batch.micro_size=4 batch.accumulation=2": "batch.accumulation=2: global_size, micro_size and",
    "batch.global_size=100 batch.micro_size=101": "batch.micro_size=101: larger than batch.global_size=100.",
    "optimizer=sgd optimizer.nesterov=true": "optimizer.nesterov=true: needs optimizer.momentum above 0",
    "resume=. init_from=x": "init_from=x: has no effect with resume",
    "schedule=step schedule.milestones=[30,60]": "schedule.milestones=[30, 60]: must be shares of the steps",
    "strategy=device_map strategy.map={layers.0:cpu,layer.2:cpu}": (
        "strategy.map.layer.2=cpu: no such module. Did you mean layers.2? (command line)"
    ),
    "strategy=device_map strategy.map=atuo": "strategy.map=atuo: must be a mapping or auto. Did you mean auto?",
    "optimizer..lr=3": "optimizer..lr=3: is not key=value: a key is made of letters, digits, _ and dots.",
    "optimizer.lr=[1,2]": "optimizer.lr=[1, 2]: must be a number.",
    "optimizer.lr=${optimizer.betas}": "optimizer.lr=[0.9, 0.999]: must be a number.",
    "device_map=auto": "device_map: no such key. Did you mean strategy.map? It is a key of strategy=device_map",
}
COMMANDS = {
    "plann": "plann: no such verb. Did you mean plan?",
    "optimizer.lr": "optimizer.lr: needs a value: optimizer.lr=VALUE.",
    "--multrun": "--multrun: no such flag. Did you mean --multirun?",
    "--config-dir /nowhere": "--config-dir /nowhere: is not a folder.",
    "diff a b": "a: is neither a run folder nor a resolved.yaml.",
    "resume out/a=1": "resume: takes 1 argument, and got none. See trainkit resume --help. A path with = in it begins",
    "--cfg yaml recipe=null": "--cfg=yaml: must be job, hydra or all.",
    "prove recipe=null strategy=device_map strategy.map={layers.0:cpu}": "strategy.map: no device for layers.2.weight,",
    "~callbacks=[progress]": "~callbacks=[progress]: removes all callbacks, without a value.",
    "~recipe=shakespeare": "~recipe=shakespeare: is not the choice of this group",
    "~model": "model=null: needs a choice.",
    "+precision=bf16": "precision=bf16: is a group: write precision=bf16.",
    "model@x=mlp": "model@x=mlp: takes no @package",
    "-m seed=1,2 hydra.job.chdir=true": "hydra.job.chdir=true: is not supported",
    "hydra.searchpath=[conf]": "hydra.searchpath=['conf']: is not read.",
    "-m ++hydra.run.dir=out": "hydra.run.dir=out: is the folder of a single run.",
    "--config-name=other": "--config-name=other: is Hydra's, and not needed here",
    "--cfg job resume RUN": "--cfg: prints what key=value compose, and not RUN.",
}
REFUSED = {**{f"recipe=null {line}": problem for line, problem in ARGUMENTS.items()}, **COMMANDS}


@pytest.mark.parametrize("line", REFUSED)
def test_a_bad_line_is_refused_by_what_is_wrong(refuse: Refuse, line: str) -> None:
    (problem,) = refuse(*line.split(" "))
    assert problem.startswith(REFUSED[line])


def test_a_key_of_other_choices_names_them(refuse: Refuse) -> None:
    (problem,) = refuse("recipe=null", "strategy.replicas=2")
    files = (shipped_conf() / "strategy").glob("*.yaml")
    having = [file.stem for file in files if "replicas" in read_choice(file).values]
    assert problem.startswith("strategy.replicas: no such key in one_device. It belongs to ")
    assert f" {', '.join(sorted(having))}: " in problem


@pytest.mark.parametrize(
    ("line", "keys"),
    [
        (
            "optimizer.lr=-1 batch.micro_size=0 loader.prefetch=3 optimizer.foreach=x eval.metric=val/x",
            "batch.micro_size loader.prefetch optimizer.lr optimizer.foreach eval.metric",
        ),
        ("batch.global_size=100 batch.micro_size=128 strategy.replicas=4", "strategy.replicas batch.micro_size"),
        ("steps=0 epochs=null lr_scaling.rule=cube warmup.start=base warmup.steps=1", "steps lr_scaling.rule"),
        ("-m strategy=one_device,mirrored strategy.replics=2", "strategy.replics strategy.replics"),
        # those that need the data and the model
        (
            "objective.input=nope strategy.replicas=9 strategy=mirrored numerics.reproducible=true",
            "objective.input strategy.replicas",
        ),
        (
            "model.in_features=3 activation_checkpointing=[Foo] warmup.steps=100000 memory_format=channels_last",
            "warmup.steps model.in_features activation_checkpointing memory_format",
        ),
    ],
)
def test_all_problems_are_reported_at_once(refuse: Refuse, line: str, keys: str) -> None:
    refused = [problem.partition(":")[0].partition("=")[0] for problem in refuse("recipe=null", *line.split(" "))]
    assert sorted(refused) == sorted(keys.split())


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("seed: no\n", 1, "seed=no: YAML reads this as true or false, false."),
        ("# a comment\nloader:\n  shuffle: off\n", 3, "loader.shuffle=off: YAML reads this as true or false"),
        ("seed: 1:30\n", 1, "seed=1:30: YAML reads this as a number in base 60, 90."),
        ("model:\n  hiddn: [3]\n", 2, "model.hiddn: no such key in mlp."),
        ("epochs: 3\nsteps: 5\n", 2, "steps=5: sets the same as epochs"),
        ("seed: 1\nseed: 2\n", 2, "mine.yaml: is not YAML: key seed is here twice, first in line 1."),
        ("defaults:\n  - override /schedule: cosin\n", 2, "schedule=cosin: no such choice."),
    ],
)
def test_a_mistake_in_a_users_own_recipe_names_its_file_and_line(
    refuse: Refuse, write_conf: Write, text: str, line: int, problem: str
) -> None:
    folder = write_conf({"recipe/mine.yaml": text})
    (message,) = refuse("--config-dir", str(folder), "recipe=mine")
    assert message.startswith(problem)
    assert message.endswith(f" ({folder}/recipe/mine.yaml:{line})")


def test_an_own_copy_of_the_defaults_that_names_what_is_gone_says_which_line(refuse: Refuse, write_conf: Write) -> None:
    folder = write_conf({"config.yaml": (shipped_conf() / "config.yaml").read_text().replace("adamw", "adamm")})
    (message,) = refuse("--config-dir", str(folder), "recipe=null")
    assert message.startswith("optimizer=adamm: no such choice. Did you mean adam?")
    assert message.endswith(f" ({folder}/config.yaml:7)")


ABSENT = MissingExtraError(key="logger=wandb", package="wandb", extra="wandb")
TWO = ConfigError([Problem(key="seed", value=-1, rule="must not be negative."), Problem(key="a", rule="no such key.")])


@pytest.mark.parametrize("error", [TWO, ABSENT])
def test_an_error_keeps_class_problems_and_text_between_processes(error: ConfigError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.problems) == (type(error), str(error), error.problems)
    assert copy.problems[-1].value is MISSING


def test_an_error_keeps_its_exit_code_and_notes_between_processes() -> None:
    error: TrainkitError = PeerError("rank 1 failed", exit_code=3)
    error.add_note("after step 7")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.exit_code, copy.__notes__) == (PeerError, "rank 1 failed", 3, ["after step 7"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("data=text_file data.path=.", "data.path=.: is a folder, and a file is needed."),
        ('data=csv_table data.target=x data.path="~/no"', "data.path=HOME/no: there is no such file."),
        ("data=token_memmap data.path=link", "data.path=link: is a link to nothing."),
        ("data=fashion_mnist data.path=no", "data.path=no: there is no such folder below HOME."),
        ("data=text_lines data.path=file data.reference=pipe", "data.reference=pipe: is a pipe or device, and a"),
        (
            "data=splits data.train={_target_:trainkit.data.TextLines,path:.}",
            "data.train.path=.: is a",
        ),
        ("data=fashion_mnist data.path=file data.download=true", "data.path=file: is a file, and a folder is needed."),
        ("init_from=no", "init_from=no: there is no such file or folder below HOME."),
    ],
)
def test_a_key_that_names_no_such_file_is_refused_before_anything_starts(
    line: str, message: str, cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(cwd))
    Path("file").touch()
    Path("link").symlink_to("no")
    os.mkfifo("pipe")
    composition = compose(["recipe=null", "steps=1", *line.split(" ")])
    with pytest.raises(ConfigError) as caught:
        checked(composition)
    assert message.replace("HOME", str(cwd)) in str(caught.value)
    checked(replace(composition, reads_files=False))


def test_what_a_run_creates_or_does_not_need_may_be_absent(cwd: Path) -> None:
    checked(compose(["recipe=null", "steps=1", "data=fashion_mnist", "data.path=no", "data.download=true"]))
    checked(compose(["recipe=null", "steps=1", "resume=auto", "init_from=no"]))


def test_a_mark_names_what_is_wrong_with_a_path(tmp_path: Path) -> None:
    assert a_folder.rule(tmp_path) is None
    assert a_file.rule("") == "is empty. Name a file."
    assert a_file.rule("a\0b") == "cannot be read: embedded null byte."
    assert Reads().rule("x" * 300) == "cannot be read: File name too long."


WORKS = [
    "~callbacks",
    "~recipe=digits",
    "~callbacks.progress",
    "+callbacks=[profiler]",
    "hydra.verbose=true",
    "+hydra.job.env_set.X=1",
    "hydra.run={dir: out}",
    "--cfg job",
    "-m seed=1,2 ++hydra.sweep.dir=out",
]


@pytest.fixture
def code(cwd: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command line up to the start of the training, and returns the exit code."""
    monkeypatch.setattr(runner, "train_composition", lambda *_, **__: {"status": "finished", "exit_code": 0})
    monkeypatch.setattr(jobs, "multirun", lambda *_, **__: [])

    def run(line: str) -> int:
        return main([line] if "{" in line and not line.startswith("-") else line.split(" "))

    return run


@pytest.mark.slow
@pytest.mark.parametrize("line", WORKS)
def test_a_habit_works(line: str, code: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert code(line) == 0, capsys.readouterr().err


def test_a_habit_changes_the_callbacks_of_a_run_and_of_a_resumed_run(tmp_path: Path) -> None:
    (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(compose(["callbacks=[early_stop,plots]"]).values))
    for line, names in (
        ("~callbacks", []),
        ("~callbacks.plots", ["early_stop"]),
        ("+callbacks=profiler", ["early_stop", "plots", "profiler"]),
        ("callbacks=[progress]", ["progress"]),
    ):
        assert sorted(compose_resumed(tmp_path, [line]).values["callbacks"]) == names
    assert compose(["+callbacks=progress"]).choices["callbacks"] == ["progress", "plots"]
    assert compose(["hydra/launcher='basic'"]).launcher == "basic"


MAP = ("strategy=device_map", "strategy.map={embed:0,blocks.0-1:0,blocks.2-3:1,head:0}")


@pytest.mark.slow
def test_the_plan_shows_what_is_where_and_the_memory_of_the_fullest_device(
    cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpt = ("recipe=null", "model=gpt", "data=synthetic_tokens", "objective=language_modelling")
    assert main(["plan", "--world", "2", *gpt, *MAP]) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if line.startswith("  memory")]
    assert row.startswith("  memory a device  6.63 MiB and activations: parameters 1.66 MiB,")
    assert lines[-4:] == [
        "  stage  modules            parameters     bytes  device",
        "      0  embed, blocks.0-1     434,688  3.32 MiB  cuda:0",
        "      1  blocks.2-3            393,728     3 MiB  cuda:1",
        "      2  head                      128     1 KiB  cuda:0",
    ]
    assert list(cwd.iterdir()) == []


@pytest.mark.usefixtures("compiled_gradients")
def test_a_step_over_several_devices_is_no_graph(refuse: Refuse) -> None:
    groups = ("strategy=mirrored", "strategy.devices=[[cpu,cpu],[cpu,cpu]]", "strategy.map=auto")
    (problem,) = refuse("plan", "recipe=null", *groups, "compile.mode=step")
    assert problem.startswith("compile.mode=step: mirrored, as its keys are set, does not run steps as graphs.")
