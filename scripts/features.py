"""Ask each strategy for each feature, and write what it refuses: `python scripts/features.py [--write]`.

A cell of the table is a run that is planned and not started; each message that refuses one is below it.
Without `--write`, exits with 1 if `docs/features.md` says otherwise.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from trainkit.api import compose
from trainkit.config.check import checked
from trainkit.config.targets.allowed import allow_packages
from trainkit.errors import ConfigError
from trainkit.run.planning.notes import model_notes
from trainkit.run.planning.plan import make_plan
from trainkit.trained.build import meta_model

PAGE: Final = ROOT / "docs/features.md"
MARK: Final = "<!-- written by scripts/features.py -->\n"
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
LOOKUP: Final = (
    "recipe=null", "model={_target_:benchmarks.lookup.Lookup,vocab_size:20,width:4,sparse:true}",
    "data={_target_:benchmarks.lookup.Bags,vocab_size:20,length:4}", "optimizer=sgd", "batch.global_size=32",
)  # fmt: skip
IMAGES: Final = (
    "recipe=null", "data=synthetic", "data.shape=[3,16,16]", "model=convnet", "model.in_channels=3",
    "model.image_size=16", "model.widths=[8,8]",
)  # fmt: skip
TEXT: Final = (
    "recipe=python_source", "model.dropout=0.0", "model.num_layers=1", "model.width=16",
    "batch.global_size=4",
)  # fmt: skip
OBJECTIVE: Final = "objective={{_target_:tests.support.{}}}"
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
    "rows of a sparse embedding": LOOKUP,
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
    "a loss that calls the model": (OBJECTIVE.format("drawing_models.TwoViews"),),
    "a loss that reads parameters": (OBJECTIVE.format("own_objectives.WeightPenalty"),),
    "a loss of derivatives by the inputs": (OBJECTIVE.format("own_objectives.GradientPenalty"),),
}
"""Row -> its arguments."""
BESIDE: Final[dict[tuple[str, str], str]] = {
    ("an objective with phases", "mesh: tensor"): "strategy.plan={generator.0:rowwise_scattered}",
    ("rows of a sparse embedding", "mesh: tensor"): "strategy.plan={head:rowwise_scattered}",
    ("`memory_format=channels_last`", "mesh: tensor"): "strategy.plan={head:rowwise_scattered}",
    ("several optimizers", "mesh: context"): "optimizers.first.match=['blocks.*'] optimizers.rest.match=['[eh]*']",
    ("`strategy.map`", "mesh: pipe x context"): "strategy.map={embed:0,rest:1}",
    ("`strategy.map`", "mirrored"): "strategy.devices=[[cpu,cpu],[cpu,cpu]]",
    ("`strategy.map`", "device_map"): "strategy.map=auto",
}
"""Row and column -> the arguments that the model needs there."""
NO_KEY: Final = "no such key in "
HEAD: Final = f"""# What each strategy takes

A run with a feature that its strategy does not support is refused before it starts. This table is what the refusals
say: each cell is a run that `python scripts/features.py --write` planned, on two or four ranks or devices of a CPU. The
messages are below. `-` is a key that the strategy or its model lacks. `multi_worker_mirrored` is as `mirrored`,
`tensor_parallel` as `mesh: tensor`; on several axes of a [mesh](mesh.md), the refusals of each hold.
[`context`](mesh.md#context) takes language models only: its columns are runs of one, or say that the model is none. The
sizes of a mesh are numbers here: an axis of `auto` is [elastic](elastic.md).

{MARK}
"""


def refusal(*overrides: str) -> str | None:
    """Return the message that refuses a run, of its first problem; None if it is planned."""
    try:
        composition = checked(compose(list(overrides), packages=["benchmarks", "tests"]))
        with allow_packages(composition.packages):
            plan = make_plan(composition.cfg, num_gpus=0)
            model = meta_model(plan.cfg)
            model_notes(plan, model, composition.is_given)
    except ConfigError as error:
        problem = error.problems[0]
        given = isinstance(problem.value, str | int | float)
        return f"`{problem.key}{f'={problem.value}' if given else ''}`: {problem.rule}"
    return None


def page() -> str:
    """Return the page."""
    rows = [f"| feature | {' | '.join(STRATEGIES)} |", f"|---|{'---|' * len(STRATEGIES)}"]
    reasons = []
    for feature, wanted in FEATURES.items():
        cells, said = [], dict[str, list[str]]()
        for name, strategy in STRATEGIES.items():
            text = TEXT if name.endswith("context") and not wanted[0].startswith("recipe=") else ()
            given = (*text, *wanted, *strategy, *BESIDE.get((feature, name), "").split())
            message = refusal(*{one.partition("=")[0]: one for one in given}.values())
            if message is not None and NO_KEY not in message:
                said.setdefault(message, []).append(name)
            cells.append("yes" if message is None else "-" if NO_KEY in message else "**no**")
        rows.append(f"| {feature} | {' | '.join(cells)} |")
        if said:
            lines = [f"- {', '.join(names)}: {message}\n" for message, names in said.items()]
            reasons.append(f"\n{feature}:\n\n{''.join(lines)}")
    return f"{HEAD}{chr(10).join(rows)}\n\n## The messages\n{''.join(reasons)}"


def main(arguments: list[str]) -> int:
    """Write the page, or compare it."""
    found = page()
    if "--write" in arguments:
        PAGE.write_text(found)
    return int(PAGE.read_text() != found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
