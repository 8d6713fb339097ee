"""Bad configs, each with the exact words the user reads; `refuse` sees to it that nothing is left behind."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from trainkit.config.yaml_files import shipped_conf

REPLICAS = ", ".join(
    sorted(file.stem for file in (shipped_conf() / "strategy").glob("*.yaml") if "\nreplicas:" in file.read_text())
)
"""The strategies that take `replicas`."""


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("epohs=3", "epohs: no such key. Did you mean epochs? (command line)"),
        ("batch.globl_size=3", "batch.globl_size: no such key. Did you mean batch.global_size? (command line)"),
        ("global_size=3", "global_size: no such key. Did you mean batch.global_size? (command line)"),
        ("clip.xyz=3", "clip.xyz: no such key in clip. There are: max_norm. (command line)"),
        ("qqq=3", "qqq: no such key. `trainkit ls` shows the groups. (command line)"),
        ("model.hiddn=[3]", "model.hiddn: no such key in mlp. Did you mean model.hidden? (command line)"),
        (
            "strategy.replicas=2",
            f"strategy.replicas: no such key in one_device. It belongs to {REPLICAS}: add strategy=ONE OF THEM. (command line)",  # noqa: E501
        ),
        ("optimizer.params=[1]", "optimizer.params: is set by trainkit: it is not a key of the config. (command line)"),
        ("callbacks.foo.x=1", "callbacks.foo: no such choice in callbacks. It needs a _target_. (command line)"),
        (
            "callbacks.early_stop.patience=3",
            "callbacks.early_stop: is not among the chosen callbacks: add it, callbacks=[...,early_stop]. (command line)",  # noqa: E501
        ),
        (
            "schedule=cosin",
            (
                "schedule=cosin: no such choice. Did you mean cosine? "
                "There are: constant, cosine, inverse_sqrt, linear, step, warmup_stable_decay. (command line)"
            ),
        ),
        (
            "strategy=[one_device,mirrored]",
            (
                "strategy=[one_device,mirrored]: takes one choice, not a list. "
                "To run them all: -m strategy=one_device,mirrored. (command line)"
            ),
        ),
        ("optimizer=3", "optimizer=3: needs the name of a choice. There are: adam, adamw, sgd. (command line)"),
        ("++strategy=mirrored", "strategy=mirrored: is a group: write strategy=mirrored. (command line)"),
        (
            "seed=1,2",
            "seed=1,2: is a list of choices, which trainkit -m trains one after the other. As one text: seed='...'. (command line)",  # noqa: E501
        ),
        ("seed=1.5", "seed=1.5: must be a whole number. (command line)"),
        ("seed=true", "seed=true: must be a whole number. (command line)"),
        ("seed='3'", "seed=3: is text: it must be a whole number. (command line)"),
        ("seed=-1", "seed=-1: must be at least 0 and less than 9223372036854775808. (command line)"),
        ("epochs=0", "epochs=0: must be more than 0. (command line)"),
        ("epochs=nan", "epochs=nan: must be finite. (command line)"),
        ("epochs=inf", "epochs=inf: must be finite. (command line)"),
        ("steps=0", "steps=0: must be at least 1. (command line)"),
        ("batch.global_size=-4", "batch.global_size=-4: must be at least 1. (command line)"),
        ("batch.drop_last=1", "batch.drop_last=1: must be true or false. (command line)"),
        (
            "lr_scaling.rule=sqr",
            "lr_scaling.rule=sqr: must be linear, sqrt or none. Did you mean sqrt? (command line)",
        ),
        ("loader.cache=yes", "loader.cache=yes: must be auto, true or false. (command line)"),
        ("numerics.lanes=6", "numerics.lanes=6: must be a power of two. Use 4 or 8. (command line)"),
        (
            "name=a/b",
            ("name=a/b: may hold letters, digits, . _ and - only, 200 at most, and not dots alone. (command line)"),
        ),
        ("clip=3", "clip=3: has its own keys: clip.max_norm. (command line)"),
        ("clip.max_norm=0", "clip.max_norm=0: must be more than 0. (command line)"),
        (
            "optimizer.lr=null",
            "optimizer.lr: is missing: the base learning rate. Give optimizer.lr=VALUE. (command line)",
        ),
        ("optimizer.lr=-1", "optimizer.lr=-1: must not be negative. (command line)"),
        (
            "optimizer.betas=[0.9,1.0]",
            "optimizer.betas=[0.9, 1.0]: each must be at least 0 and less than 1. (command line)",
        ),
        (
            "optimizer.foreach=true",
            (
                "optimizer.foreach=true: fused and foreach are two ways of doing the same. "
                "Add optimizer.fused=false. (command line)"
            ),
        ),
        (
            "optimizer.groups=3",
            "optimizer.groups=3: must be a mapping: a name, and below it match and the keys that differ. (command line)",  # noqa: E501
        ),
        (
            "optimizer.groups.bias.weight_decay=0",
            "optimizer.groups.bias: needs match, a list of patterns: match: ['*.bias', 'type:*Norm*']. (command line)",
        ),
        (
            "optimizer.groups.no_decay.weight_dcay=0",
            (
                "optimizer.groups.no_decay.weight_dcay: no such key of the optimizer. "
                "Did you mean optimizer.groups.no_decay.weight_decay? (command line)"
            ),
        ),
        (
            "eval.mode=max",
            "eval.mode=max: has no effect without eval.metric. (command line)",
        ),
        (
            "lr_scaling.rule=sqrt",
            "lr_scaling.rule=sqrt: has no effect without lr_scaling.reference_batch: nothing is scaled. (command line)",
        ),
        (
            "warmup.start=base",
            "warmup.start=base: has no effect without a warmup. Give warmup.epochs or warmup.steps. (command line)",
        ),
        ("numerics.lanes=4", "numerics.lanes=4: has no effect without numerics.reproducible=true. (command line)"),
        (
            "loader.prefetch=4",
            "loader.prefetch=4: has no effect without workers. Give loader.num_workers. (command line)",
        ),
        (
            "precision.min_scale=2",
            "precision.min_scale=2: has no effect: only precision=fp16_mixed scales its loss. (command line)",
        ),
        ("sweep.name=x", "sweep.name=x: has no effect without -m. (command line)"),
        ("hydra.sweep.dir=x", "hydra.sweep.dir=x: has no effect without -m. (command line)"),
        (
            "model._target_=os.system",
            (
                "model._target_=os.system: os is not among the packages that targets may come from "
                "(trainkit, torch, torchvision, timm, transformers, torchmetrics). "
                "To trust it: --allow-package os. (command line)"
            ),
        ),
        (
            "model._target_=Mlp",
            "model._target_=Mlp: must name a class or function with its module, package.module.Name. (command line)",
        ),
        (
            "init_from=${batch.size}",
            "init_from=${batch.size}: refers to batch.size, and there is no such key. (command line)",
        ),
        ("data.path=~/x", "data.path=~/x: has a character that needs quotes. Write 'data.path=\"~/x\"' (command line)"),
        ("name=exp#1", "name=exp#1: has a character that needs quotes. Write 'name=\"exp#1\"' (command line)"),
        ("resume=a=b", "resume=a=b: has a character that needs quotes. Write 'resume=\"a=b\"' (command line)"),
        ("~clip.max", "~clip.max: there is no such key to delete. (command line)"),
        ("epochs=", "epochs=: must be a number or null. (command line)"),
        ("batch={global_size:3,micro_size:x}", "batch.micro_size=x: must be a whole number or null. (command line)"),
        ("data.scaling=???", "data.scaling: needs a value: data.scaling=VALUE. (command line)"),
        (
            "precision=null",
            "precision=null: needs a choice. There are: bf16, bf16_mixed, fp16_mixed, fp32, fp64, tf32. (command line)",
        ),
        (
            "clip.max_norm@x=3",
            "clip.max_norm@x=3: clip.max_norm is not a group, so it takes no @package. (command line)",
        ),
    ],
)
def test_a_bad_argument_is_refused_in_these_words(
    refuse: Callable[..., list[str]], argument: str, problem: str
) -> None:
    assert refuse("recipe=null", argument) == [problem]


@pytest.mark.parametrize(
    ("arguments", "problems"),
    [
        (
            ("epochs=3", "steps=5"),
            ["steps=5: sets the same as epochs, set at the same place. Give one of the two. (command line)"],
        ),
        (
            ("warmup.epochs=1", "warmup.steps=5"),
            [
                "warmup.steps=5: sets the same as warmup.epochs, set at the same place. Give one of the two. (command line)"  # noqa: E501
            ],
        ),
        (
            ("batch.global_size=100", "batch.micro_size=128", "strategy.replicas=4"),
            [
                (
                    f"strategy.replicas: no such key in one_device. It belongs to {REPLICAS}: add strategy=ONE OF THEM."
                    " (command line)"
                ),
                "batch.micro_size=128: larger than batch.global_size=100. Use 100 or less. (command line)",
            ],
        ),
        (
            ("optimizer.lr=-1", "batch.micro_size=0", "loader.prefetch=3", "optimizer.foreach=x", "eval.metric=val/x"),
            [
                "batch.micro_size=0: must be at least 1. (command line)",
                "loader.prefetch=3: has no effect without workers. Give loader.num_workers. (command line)",
                "optimizer.lr=-1: must not be negative. (command line)",
                "optimizer.foreach=x: must be true or false or null. (command line)",
                (
                    "eval.metric=val/x: no such metric. Did you mean val/loss? There are: val/loss, val/accuracy. (command line)"  # noqa: E501
                ),
            ],
        ),
        (
            ("strategy=mirrored", "strategy.replicas=0", "strategy.timeout_s=-1", "schedule.end=-1"),
            [
                "schedule.end=-1: must be at least 0. (command line)",
                "strategy.replicas=0: must be at least 1. (command line)",
                "strategy.timeout_s=-1: must be more than 0. (command line)",
            ],
        ),
        (
            ("schedule=inverse_sqrt", "schedule.timescale=0", "precision=fp16_mixed", "precision.growth_interval=0"),
            [
                "schedule.timescale=0: must be at least 1. (command line)",
                "precision.growth_interval=0: must be at least 1. (command line)",
            ],
        ),
        (
            ("schedule=step", "schedule.milestones=[30,60]"),
            [
                "schedule.milestones=[30, 60]: must be shares of the steps after warmup, increasing, each between 0 and 1. Epochs: schedule.milestones_epochs; steps: schedule.milestones_steps. (command line)"  # noqa: E501
            ],
        ),
        (
            ("=3", "hydra.run.dir=", "hydra.sweep.dir=/dev/null/x"),
            [
                "=3: names no key. Write key=value. (command line)",
                "hydra.run.dir=: is empty. Name a folder. (command line)",
                "hydra.sweep.dir=/dev/null/x: /dev/null is no folder. (command line)",
            ],
        ),
        (
            ("steps=0", "epochs=null", "lr_scaling.rule=cube", "warmup.start=base", "warmup.steps=1"),
            [
                "steps=0: must be at least 1. (command line)",
                "lr_scaling.rule=cube: must be linear, sqrt or none. (command line)",
            ],
        ),
        (
            ("batch.global_size=100", "batch.micro_size=128"),
            ["batch.micro_size=128: larger than batch.global_size=100. Use 100 or less. (command line)"],
        ),
        (
            ("batch.global_size=10", "batch.accumulation=12"),
            ["batch.accumulation=12: more shards than samples: batch.global_size=10. Use 10 or less. (command line)"],
        ),
        (
            ("batch.global_size=8", "batch.micro_size=4", "batch.accumulation=2"),
            [
                (
                    "batch.accumulation=2: global_size, micro_size and accumulation are set at the same place. "
                    "Give any two of the three. (command line)"
                )
            ],
        ),
        (
            ("batch.global_size=null",),
            [
                (
                    "batch.global_size: a step needs a size. Give it, or both batch.micro_size and batch.accumulation. "
                    "(command line)"
                )
            ],
        ),
        (("epochs=null",), ["epochs: a run needs a length. Give epochs or steps."]),
        (("steps=5", "stop_at_step=9"), ["stop_at_step=9: has no effect: the run has steps=5. (command line)"]),
        (
            ("warmup.steps=5", "warmup.start=base"),
            ["warmup.start=base: has no effect: nothing is scaled, so base is the peak already. (command line)"],
        ),
        (
            ("lr_scaling.rule=none", "lr_scaling.reference_batch=32"),
            ["lr_scaling.reference_batch=32: has no effect with lr_scaling.rule=none. (command line)"],
        ),
        (
            ("optimizer=sgd", "optimizer.nesterov=true"),
            ["optimizer.nesterov=true: needs optimizer.momentum above 0 and optimizer.dampening=0. (command line)"],
        ),
        (
            ("optimizer=sgd", "optimizer.dampening=0.5"),
            ["optimizer.dampening=0.5: has no effect without optimizer.momentum. (command line)"],
        ),
        (
            ("resume=.", "init_from=x"),
            ["init_from=x: has no effect with resume: the weights are those of the checkpoint. (command line)"],
        ),
        (
            ("model.hidden=abc", "model.dropout='0.1'", "optimizer.lr=x"),
            [
                "model.hidden=abc: must be a list of whole numbers. (command line)",
                "model.dropout=0.1: is text: it must be a number. (command line)",
                "optimizer.lr=x: must be a number. (command line)",
            ],
        ),
        (
            ("eval.metric=val/acuracy",),
            [
                (
                    "eval.metric=val/acuracy: no such metric. Did you mean val/accuracy? "
                    "There are: val/loss, val/accuracy. (command line)"
                )
            ],
        ),
        (("schedule.end=[1]",), ["schedule.end=[1]: must be a number. (command line)"]),
        (
            ("model._target_=torch.nn.Linaer",),
            ["model._target_=torch.nn.Linaer: there is no Linaer in torch.nn. (command line)"],
        ),
        (
            ("model._target_=trainkit.models.absent.Net",),
            ["model._target_=trainkit.models.absent.Net: there is no absent in trainkit.models. (command line)"],
        ),
        (
            ("supervisor.max_restarts=1",),
            ["supervisor.max_restarts=1: has no effect: this strategy runs in one process. (command line)"],
        ),
        (
            ("loader.num_workers=2",),
            [
                "loader.num_workers=2: has no effect: the dataset is in memory. With loader.cache=false its samples are read one by one. (command line)"  # noqa: E501
            ],
        ),
        (
            ("hydra.runn.dir=x",),
            ["hydra.runn.dir=x: is no key of Hydra. trainkit --cfg hydra shows them. (command line)"],
        ),
        (("-m", "seed=range(5,1)"), ["seed=range(5,1): is an empty sweep: there is nothing to run. (command line)"]),
        (
            ("-m", "strategy=one_device,mirrored", "strategy.replics=2"),
            [
                (
                    "strategy.replics: no such key in one_device. There are: device. "
                    "In the point strategy=one_device. (command line)"
                ),
                (
                    "strategy.replics: no such key in mirrored. Did you mean strategy.replicas? "
                    "In the point strategy=mirrored. (command line)"
                ),
            ],
        ),
        (("-m", "seed=1,x"), ["seed=x: must be a whole number. (command line)"]),
    ],
)
def test_bad_arguments_are_refused_all_at_once(
    refuse: Callable[..., list[str]], arguments: tuple[str, ...], problems: list[str]
) -> None:
    assert refuse("recipe=null", *arguments) == problems


@pytest.mark.parametrize(
    "arguments",
    [
        ("objective.input=nope", "strategy.replicas=9", "strategy=mirrored", "numerics.reproducible=true"),
        ("model.in_features=3", "activation_checkpointing=[Foo]", "warmup.steps=100000", "memory_format=channels_last"),
    ],
)
def test_problems_that_need_the_data_and_the_model_are_reported_together(
    refuse: Callable[..., list[str]], arguments: tuple[str, ...]
) -> None:
    told = {problem.partition("=")[0] for problem in refuse("recipe=null", *arguments)}
    assert told == {argument.partition("=")[0] for argument in arguments} - {"strategy", "numerics.reproducible"}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("plann",), "plann: no such verb. Did you mean plan? (command line)"),
        (("ls", "schedul"), "schedul: no such group. Did you mean schedule? (command line)"),
        (("ls", "schedule", "cosin"), "schedule=cosin: no such choice. Did you mean cosine? (command line)"),
        (("--multrun",), "--multrun: no such flag. Did you mean --multirun? (command line)"),
        (("--config-dir",), "--config-dir: needs a value: --config-dir DIR. (command line)"),
        (("--config-dir", "/nowhere"), "--config-dir /nowhere: is not a folder. (command line)"),
        (
            ("--config-name", "x"),
            (
                "--config-name: is Hydra's, and not needed here: there is only one primary "
                "config. A recipe describes a whole training: recipe=NAME. (command line)"
            ),
        ),
        (("--multirun=3",), "--multirun=3: --multirun takes no value. (command line)"),
        (
            ("diff", "-m", "a", "b"),
            "-m: belongs to train. diff compares the choices of a comma list without it. (command line)",
        ),
        (("diff", "a"), "diff: takes 2 arguments, and got a. Set a key by key=value. (command line)"),
        (("diff", "a", "b"), "a: is neither a run folder nor a resolved.yaml. (command line)"),
        (("resume", "nowhere"), "resume=nowhere: is not a run folder: it has no resolved.yaml. (command line)"),
        (("train", "3"), "train: takes 0 arguments, and got 3. Set a key by key=value. (command line)"),
        (
            ("explain", "optimzer.lr", "recipe=null"),
            "optimzer.lr: no such key in this composition. Did you mean optimizer.lr? (command line)",
        ),
        (("--cfg", "yaml", "recipe=null"), "--cfg=yaml: must be job, hydra or all. (command line)"),
    ],
)
def test_a_bad_command_is_refused_in_these_words(
    refuse: Callable[..., list[str]], arguments: tuple[str, ...], problem: str
) -> None:
    assert refuse(*arguments) == [problem]


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("seed: no\n", 1, "seed=no: YAML reads this as true or false, false. Write false, or quote it for text: 'no'."),
        (
            "# a comment\nloader:\n  shuffle: off\n",
            3,
            "loader.shuffle=off: YAML reads this as true or false, false. Write false, or quote it for text: 'off'.",
        ),
        (
            "seed: 1:30\n",
            1,
            "seed=1:30: YAML reads this as a number in base 60, 90. Write 90, or quote it for text: '1:30'.",
        ),
        (
            "seed: 0777\n",
            1,
            "seed=0777: YAML reads this as an octal number, 511. Write 511, or quote it for text: '0777'.",
        ),
        ("batch:\n  global_size: many\n", 2, "batch.global_size=many: must be a whole number or null."),
        ("model:\n  hiddn: [3]\n", 2, "model.hiddn: no such key in mlp. Did you mean model.hidden?"),
        ("epochs: 3\nsteps: 5\n", 2, "steps=5: sets the same as epochs, set at the same place. Give one of the two."),
        ("seed: [1\n", 2, "mine.yaml: is not YAML: did not find expected ',' or ']'."),
        ("seed: 1\nseed: 2\n", 2, "mine.yaml: is not YAML: key seed is here twice, first in line 1."),
        (
            "defaults:\n  - override /schedule: cosin\n",
            2,
            (
                "schedule=cosin: no such choice. Did you mean cosine? "
                "There are: constant, cosine, inverse_sqrt, linear, step, warmup_stable_decay."
            ),
        ),
        ("- seed\n", 1, "mine.yaml: must hold keys and values."),
    ],
)
def test_a_mistake_in_a_users_own_recipe_names_its_file_and_line(
    refuse: Callable[..., list[str]],
    write_conf: Callable[[Mapping[str, str]], Path],
    text: str,
    line: int,
    problem: str,
) -> None:
    folder = write_conf({"recipe/mine.yaml": text})
    (found,) = refuse("--config-dir", str(folder), "recipe=mine")
    assert found == f"{problem} ({folder}/recipe/mine.yaml:{line})"


def test_a_shipped_file_that_names_what_is_gone_says_which_line(
    refuse: Callable[..., list[str]], write_conf: Callable[[Mapping[str, str]], Path]
) -> None:
    folder = write_conf({"config.yaml": (shipped_conf() / "config.yaml").read_text().replace("adamw", "adamm")})
    (found,) = refuse("--config-dir", str(folder), "recipe=null")
    assert found == (
        f"optimizer=adamm: no such choice. Did you mean adam? There are: adam, adamw, sgd. ({folder}/config.yaml:7)"
    )
