"""A rule between keys that is skipped, or that blames another key or line, is caught here alone.

Each bad config is refused by its key, with the word that helps; `refuse` sees to it that nothing is left behind.
"""

import pytest

from tests.config.conftest import Refuse, Write
from trainkit.config.compose import compose
from trainkit.config.yaml_files import shipped_conf

ARGUMENTS = {
    "epohs=3": "epohs: no such key. Did you mean epochs?",
    "global_size=3": "global_size: no such key. Did you mean batch.global_size?",
    "clip.xyz=3": "clip.xyz: no such key in clip. There are: max_norm.",
    "qqq=3": "qqq: no such key. `trainkit ls`",
    "model.hiddn=[3]": "model.hiddn: no such key in mlp. Did you mean model.hidden?",
    "optimizer.params=[1]": "optimizer.params: is set by trainkit",
    "callbacks.foo.x=1": "callbacks.foo: no such choice",
    "callbacks.early_stop.patience=3": "callbacks.early_stop: is not among the chosen callbacks",
    "schedule=cosin": "schedule=cosin: no such choice. Did you mean cosine? There are: constant, cosine,",
    "strategy=[one_device,mirrored]": "strategy=[one_device,mirrored]: takes one choice, not a list.",
    "optimizer=3": "optimizer=3: needs the name of a choice.",
    "precision=null": "precision=null: needs a choice.",
    "seed='3'": "seed=3: is text:",
    "seed=-1": "seed=-1: must be at least 0 and less than 9223372036854775808.",
    "epochs=": "epochs=: must be a number or null.",
    "batch={global_size:3,micro_size:x}": "batch.micro_size=x: must be a whole number",
    "lr_scaling.rule=sqr": "lr_scaling.rule=sqr: must be linear, sqrt or none. Did you mean sqrt?",
    "numerics.lanes=6": "numerics.lanes=6: must be a power of two. Use 4 or 8.",
    "name=a/b": "name=a/b: may hold letters, digits,",
    "clip=3": "clip=3: has its own keys: clip.max_norm.",
    "optimizer.lr=null": "optimizer.lr: is missing: the base learning rate.",
    "optimizer.betas=[0.9,1.0]": "optimizer.betas=[0.9, 1.0]: each must be at least 0 and less than 1.",
    "optimizer.foreach=true": "optimizer.foreach=true: fused and foreach",
    "optimizer.groups=3": "optimizer.groups=3: must be a mapping",
    "optimizer.groups.bias.weight_decay=0": "optimizer.groups.bias: needs match",
    "optimizer.groups.no_decay.weight_dcay=0": "optimizer.groups.no_decay.weight_dcay: no such key of the optimizer.",
    "eval.mode=max": "eval.mode=max: has no effect without eval.metric.",
    "eval.metric=val/acuracy": "eval.metric=val/acuracy: no such metric. Did you mean val/accuracy?",
    "lr_scaling.rule=sqrt": "lr_scaling.rule=sqrt: has no effect without lr_scaling.reference_batch",
    "warmup.start=base": "warmup.start=base: has no effect without a warmup.",
    "numerics.lanes=4": "numerics.lanes=4: has no effect without numerics.reproducible=true.",
    "loader.prefetch=4": "loader.prefetch=4: has no effect without workers.",
    "loader.num_workers=2": "loader.num_workers=2: has no effect: the dataset is in memory.",
    "precision.min_scale=2": "precision.min_scale=2: has no effect: only precision=fp16_mixed",
    "supervisor.max_restarts=1": "supervisor.max_restarts=1: has no effect: this strategy runs in one process.",
    "sweep.name=x": "sweep.name=x: has no effect without -m.",
    "epochs=null": "epochs: a run needs a length.",
    "batch.global_size=null": "batch.global_size: a step needs a size.",
    "model._target_=Mlp": "model._target_=Mlp: must name a class or function with its module",
    "model._target_=torch.nn.Linaer": "model._target_=torch.nn.Linaer: there is no Linaer in torch.nn.",
    "init_from=${batch.size}": "init_from=${batch.size}: refers to batch.size, and there is no such key.",
    "data.path=~/x": "data.path=~/x: has a character that needs quotes. Write 'data.path=\"~/x\"'",
    "data.scaling=???": "data.scaling: needs a value",
    "=3": "=3: names no key.",
    "-m hydra.sweep.dir=/dev/null/x": "hydra.sweep.dir=/dev/null/x: /dev/null is no folder.",
    "-m seed=range(5,1)": "seed=range(5,1): is an empty sweep",
    "-m seed=1,x": "seed=x: must be a whole number.",
    "epochs=3 steps=5": "steps=5: sets the same as epochs, set at the same place.",
    "batch.global_size=8 batch.micro_size=4 batch.accumulation=2": "batch.accumulation=2: global_size, micro_size and",
    "batch.global_size=100 batch.micro_size=101": "batch.micro_size=101: larger than batch.global_size=100.",
    "batch.global_size=10 batch.accumulation=11": "batch.accumulation=11: more shards than samples",
    "steps=5 stop_at_step=6": "stop_at_step=6: has no effect: the run has steps=5.",
    "warmup.steps=5 warmup.start=base": "warmup.start=base: has no effect: nothing is scaled",
    "lr_scaling.rule=none lr_scaling.reference_batch=32": "lr_scaling.reference_batch=32: has no effect with",
    "optimizer=sgd optimizer.nesterov=true": "optimizer.nesterov=true: needs optimizer.momentum above 0",
    "optimizer=sgd optimizer.dampening=0.5": "optimizer.dampening=0.5: has no effect without optimizer.momentum.",
    "resume=. init_from=x": "init_from=x: has no effect with resume",
    "schedule=step schedule.milestones=[30,60]": "schedule.milestones=[30, 60]: must be shares of the steps",
    "strategy=device_map strategy.map={layers.0:cpu,layer.2:cpu}": (
        "strategy.map.layer.2=cpu: no such module. Did you mean layers.2? (command line)"
    ),
    "strategy=device_map strategy.map=atuo": "strategy.map=atuo: must be a mapping or auto. Did you mean auto?",
    "device_map=auto": "device_map: no such key. Did you mean strategy.map? It is a key of strategy=device_map",
}
COMMANDS = {
    "plann": "plann: no such verb. Did you mean plan?",
    "ls schedul": "schedul: no such group. Did you mean schedule?",
    "ls schedule cosin": "schedule=cosin: no such choice. Did you mean cosine?",
    "--multrun": "--multrun: no such flag. Did you mean --multirun?",
    "--config-dir": "--config-dir: needs a value",
    "--config-dir /nowhere": "--config-dir /nowhere: is not a folder.",
    "--multirun=3": "--multirun=3: --multirun takes no value.",
    "diff -m a b": "-m: belongs to train.",
    "diff a": "diff: takes 2 arguments, and got a.",
    "diff a b": "a: is neither a run folder nor a resolved.yaml.",
    "resume out/a=1": "resume: takes 1 argument, and got none. See trainkit resume --help. A path with = in it begins",
    "resume nowhere": "resume=nowhere: is not a run folder",
    "explain optimzer.lr recipe=null": "optimzer.lr: no such key in this composition. Did you mean optimizer.lr?",
    "schema confg": "confg: no such schema. Did you mean config?",
    "schema config seed=1": "schema: takes no key=value.",
    "--cfg yaml recipe=null": "--cfg=yaml: must be job, hydra or all.",
    "prove recipe=null strategy=device_map strategy.map={layers.0:cpu}": "strategy.map: no device for layers.2.weight,",
}
REFUSED = {**{f"recipe=null {line}": told for line, told in ARGUMENTS.items()}, **COMMANDS}


@pytest.mark.parametrize("line", REFUSED)
def test_a_bad_line_is_refused_by_what_is_wrong(refuse: Refuse, line: str) -> None:
    (problem,) = refuse(*line.split(" "))
    assert problem.startswith(REFUSED[line])


def test_a_key_of_other_choices_names_them(refuse: Refuse) -> None:
    (problem,) = refuse("recipe=null", "strategy.replicas=2")
    having = [file.stem for file in (shipped_conf() / "strategy").glob("*.yaml") if "\nreplicas:" in file.read_text()]
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
    told = [problem.partition(":")[0].partition("=")[0] for problem in refuse("recipe=null", *line.split(" "))]
    assert sorted(told) == sorted(keys.split())


def test_a_problem_of_a_sweep_names_the_points_that_have_it(refuse: Refuse) -> None:
    first, second = refuse("-m", "recipe=null", "strategy=one_device,mirrored", "strategy.replics=2")
    assert "no such key in one_device." in first
    assert first.endswith("In the point strategy=one_device. (command line)")
    assert "no such key in mirrored. Did you mean strategy.replicas?" in second


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("seed: no\n", 1, "seed=no: YAML reads this as true or false, false."),
        ("# a comment\nloader:\n  shuffle: off\n", 3, "loader.shuffle=off: YAML reads this as true or false"),
        ("seed: 1:30\n", 1, "seed=1:30: YAML reads this as a number in base 60, 90."),
        ("seed: 0777\n", 1, "seed=0777: YAML reads this as an octal number, 511."),
        ("batch:\n  global_size: many\n", 2, "batch.global_size=many: must be a whole number"),
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
    (found,) = refuse("--config-dir", str(folder), "recipe=mine")
    assert found.startswith(problem)
    assert found.endswith(f" ({folder}/recipe/mine.yaml:{line})")


def test_a_trap_that_the_command_line_replaces_is_no_problem(write_conf: Write) -> None:
    folder = write_conf({"recipe/mine.yaml": "seed: no\nloader: {shuffle: off}\n"})
    composed = compose(["recipe=mine", "seed=3"], config_dirs=[folder])
    assert [problem.key for problem in composed.problems] == ["loader.shuffle"]


def test_an_own_copy_of_the_defaults_that_names_what_is_gone_says_which_line(refuse: Refuse, write_conf: Write) -> None:
    folder = write_conf({"config.yaml": (shipped_conf() / "config.yaml").read_text().replace("adamw", "adamm")})
    (found,) = refuse("--config-dir", str(folder), "recipe=null")
    assert found.startswith("optimizer=adamm: no such choice. Did you mean adam?")
    assert found.endswith(f" ({folder}/config.yaml:7)")
