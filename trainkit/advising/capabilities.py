"""Which features each strategy takes: every pair is planned as a run, and what refuses one is the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final

from trainkit.config.check import checked
from trainkit.config.compose import compose
from trainkit.config.composition import Composition
from trainkit.config.grammar import key_of
from trainkit.config.targets.allowed import allow_packages
from trainkit.errors import ConfigError, UnknownKey
from trainkit.report.schemas.looking import Capability
from trainkit.run.planning.notes import model_notes
from trainkit.run.planning.plan import make_plan
from trainkit.trained.build import meta_model

STRATEGIES: Final[dict[str, tuple[str, ...]]] = {
    "one_device": ("strategy=one_device",),
    "mirrored": ("strategy=mirrored", "strategy.replicas=2"),
    "mesh: replicate": ("strategy=mesh", "strategy.replicate=2", "strategy.shard=1"),
    "mesh: shard": ("strategy=mesh", "strategy.shard=2"),
    "mesh: tensor": ("strategy=mesh", "strategy.shard=1", "strategy.tensor=2"),
    "mesh: pipe x shard": ("strategy=mesh", "strategy.pipe=2", "strategy.shard=2"),
    "mesh: context": ("strategy=mesh", "strategy.shard=1", "strategy.context=2"),
    "mesh: pipe x context": ("strategy=mesh", "strategy.shard=1", "strategy.pipe=2", "strategy.context=2"),
    "fsdp": ("strategy=fsdp", "strategy.replicas=2"),
    "pipeline": ("strategy=pipeline", "strategy.stages=2"),
    "device_map": ("strategy=device_map", "strategy.devices=[cpu,cpu]"),
    "local_sgd": ("strategy=local_sgd", "strategy.replicas=2"),
    "central_storage": ("strategy=central_storage", "strategy.compute_devices=[cpu,cpu]"),
    "parameter_server": ("strategy=parameter_server", "strategy.workers=2", "strategy.servers=1"),
    "parameter_server, async": (
        "strategy=parameter_server", "strategy.workers=2", "strategy.servers=1", "strategy.mode=async",
    ),
}  # fmt: skip
"""Column -> its arguments."""
IMAGES: Final = (
    "recipe=null", "data=synthetic", "data.shape=[3,16,16]", "model=convnet", "model.in_channels=3",
    "model.image_size=16", "model.widths=[8,8]",
)  # fmt: skip
TEXT: Final = (
    "recipe=python_source", "model.dropout=0.0", "model.num_layers=1", "model.width=16",
    "batch.global_size=4", "data.max_bytes=20000",  # of the whole library, each plan would read 30 MB
)  # fmt: skip
FEATURES: Final[dict[str, tuple[str, ...]]] = {
    "accumulation (`batch.micro_size`)": ("batch.micro_size=2",),
    "clipping": ("clip.max_norm=1.0",),
    "`precision=bf16`, with masters": ("precision=bf16",),
    "`precision=fp16_mixed`, a scaled loss": ("precision=fp16_mixed",),
    "`average=ema`": ("average=ema",),
    "`average=swa`, with batch normalisation": ("average=swa", "model.batch_norm=true"),
    "batch normalisation": ("model.batch_norm=true",),
    "several optimizers": ("optimizers.first.match=['layers.0.*']", "optimizers.rest.match=['layers.2.*']"),
    "an objective with phases": ("recipe=gan",),
    "an optimizer of whole parameters": ("optimizer={_target_:torch.optim.Adafactor,lr:0.01}",),
    "`activation_checkpointing=full`": (*TEXT, "activation_checkpointing=full"),
    "`compile.mode=default`": (*TEXT, "compile.mode=default"),
    "`compile.mode=step`": ("compile.mode=step",),
    "`convert=float8`": (*TEXT, "convert=float8", "convert.emulate=true", "precision=bf16_mixed"),
    "`memory_format=channels_last`": (*IMAGES, "memory_format=channels_last"),
    "`numerics.reproducible`, with `optimizer.fused=false`": ("numerics.reproducible=true", "optimizer.fused=false"),
    "`numerics.on_nonfinite=skip`": ("numerics.on_nonfinite=skip",),
    "`numerics.on_nonfinite=rollback`": ("numerics.on_nonfinite=rollback",),
    "`strategy.compression`": ("strategy.compression=bf16",),
    "`strategy.map`": ("strategy.map={layers.0-1:0,rest:1}",),
    "`elastic.min_replicas`": ("elastic.min_replicas=1",),
}
"""Row -> its arguments."""
BESIDE: Final[dict[tuple[str, str], str]] = {
    ("an objective with phases", "mesh: tensor"): "strategy.plan={generator.0:rowwise_scattered}",
    ("`memory_format=channels_last`", "mesh: tensor"): "strategy.plan={head:rowwise_scattered}",
    ("several optimizers", "mesh: context"): "optimizers.first.match=['blocks.*'] optimizers.rest.match=['[eh]*']",
    ("`strategy.map`", "mesh: pipe x context"): "strategy.map={embed:0,rest:1}",
    ("`strategy.map`", "mirrored"): "strategy.devices=[[cpu,cpu],[cpu,cpu]]",
    ("`strategy.map`", "device_map"): "strategy.map=auto",
}
"""Row and column -> the arguments that the model needs there."""
ALIASES: Final = {"multi_worker_mirrored": "mirrored", "tensor_parallel": "mesh: tensor"}
"""Strategy -> the column that stands for it."""


def _with_strategy(feature: Composition, strategy: Composition) -> Composition:
    """Return the composition of a feature with the strategy of another one."""
    origins = {path: origin for path, origin in feature.origins.items() if path[0] != "strategy"}
    return replace(
        feature,
        values={**feature.values, "strategy": strategy.values["strategy"]},
        origins=origins | {path: origin for path, origin in strategy.origins.items() if path[0] == "strategy"},
        choices={**feature.choices, "strategy": strategy.choices["strategy"]},
        overrides=(*feature.overrides, *strategy.overrides),
        given_keys=(*feature.given_keys, *strategy.given_keys),
    )


def _answer(composition: Composition, opened: dict[str, Mapping[str, Any]]) -> tuple[bool | None, str | None]:
    """Return whether a run is planned, None if the strategy or its model has no such key, and the first problem.

    Args:
        composition: the run.
        opened: the splits of the data of earlier runs, which are opened once.
    """
    try:
        composition = checked(composition)
        data = json.dumps(composition.cfg.data, default=str)
        with allow_packages(composition.packages):
            plan = make_plan(composition.cfg, num_gpus=0, splits=opened.get(data))
            opened[data] = plan.components.datasets
            model_notes(plan, meta_model(plan.cfg), composition.is_given)
    except ConfigError as error:
        problem = error.problems[0]
        if isinstance(problem, UnknownKey):
            return None, problem.rule
        shown = isinstance(problem.value, str | int | float)
        return False, f"`{problem.key}{f'={problem.value}' if shown else ''}`: {problem.rule}"
    return True, None


def capabilities(
    strategies: Mapping[str, Sequence[str]] = STRATEGIES,
    features: Mapping[str, Sequence[str]] = FEATURES,
    beside: Mapping[tuple[str, str], str] = BESIDE,
    *,
    packages: Sequence[str] = (),
) -> Iterator[Capability]:
    """Yield for each feature what each strategy answers; plans one run for each pair.

    Args:
        strategies: name -> its arguments, for two or four ranks of a CPU.
        features: name -> its arguments.
        beside: feature and strategy -> the arguments that the model needs there.
        packages: packages of the classes that the arguments name.
    """
    composed = cache(lambda *lines: compose([*{key_of(line): line for line in lines}.values()], packages=packages))
    opened: dict[str, Mapping[str, Any]] = {}
    for feature, arguments in features.items():
        for name, strategy in strategies.items():
            text = TEXT if name.endswith("context") and not arguments[0].startswith("recipe=") else ()
            words = (*text, *arguments, *beside.get((feature, name), "").split())
            if any(key_of(word).startswith("strategy") for word in words):  # of a choice: they are composed together
                composition = composed(*text, *arguments, *strategy, *words[len(text) + len(arguments) :])
            else:
                composition = _with_strategy(composed(*words), composed(*strategy))
            supported, reason = _answer(composition, opened)
            yield Capability(feature=feature.replace("`", ""), strategy=name, supported=supported, reason=reason)
