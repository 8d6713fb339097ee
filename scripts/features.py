"""Ask each strategy for each feature, and write what it refuses: `python scripts/features.py [--write]`.

A cell of the table is a run that is planned and not started, as by `trainkit capabilities`; each message that refuses
one is below it. Without `--write`, exits with 1 if `docs/features.md` says otherwise.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from trainkit.advising.capabilities import BESIDE, FEATURES, STRATEGIES, capabilities

PAGE: Final = ROOT / "docs/features.md"
MARK: Final = "<!-- written by scripts/features.py -->\n"
LOOKUP: Final = (
    "recipe=null", "model={_target_:benchmarks.lookup.Lookup,vocab_size:20,width:4,sparse:true}",
    "data={_target_:benchmarks.lookup.Bags,vocab_size:20,length:4}", "optimizer=sgd", "batch.global_size=32",
)  # fmt: skip
OBJECTIVE: Final = "objective={{_target_:tests.support.{}}}"
OWN: Final[dict[str, tuple[str, ...]]] = {
    "rows of a sparse embedding": LOOKUP,
    "a loss that calls the model": (OBJECTIVE.format("drawing_models.TwoViews"),),
    "a loss that reads parameters": (OBJECTIVE.format("own_objectives.WeightPenalty"),),
    "a loss of derivatives by the inputs": (OBJECTIVE.format("own_objectives.GradientPenalty"),),
}
"""Rows with classes that are not shipped."""
OWN_BESIDE: Final = {
    ("rows of a sparse embedding", "mesh: tensor"): "strategy.plan={head:rowwise_scattered}",
}
HEAD: Final = f"""# What each strategy takes

A run with a feature that its strategy does not support is refused before it starts. This table is what the refusals
say: each cell is a run that `python scripts/features.py --write` planned, on two or four ranks or devices of a CPU. The
messages are below. `-` is a key that the strategy or its model lacks. `multi_worker_mirrored` is as `mirrored`,
`tensor_parallel` as `mesh: tensor`; on several axes of a [mesh](mesh.md), the refusals of each hold.
[`context`](mesh.md#context) takes language models only: its columns are runs of one, or say that the model is none. The
sizes of a mesh are numbers here: an axis of `auto` is [elastic](runs.md#elastic).

{MARK}
"""


def page() -> str:
    """Return the page."""
    rows = [f"| feature | {' | '.join(STRATEGIES)} |", f"|---|{'---|' * len(STRATEGIES)}"]
    reasons = []
    features, beside = {**FEATURES, **OWN}, {**BESIDE, **OWN_BESIDE}
    answers = capabilities(features=features, beside=beside, packages=["benchmarks", "tests"])
    for feature in features:
        cells, names_of = [], dict[str, list[str]]()
        for answer in itertools.islice(answers, len(STRATEGIES)):
            if answer["supported"] is False:
                names_of.setdefault(str(answer["reason"]), []).append(answer["strategy"])
            cells.append({True: "yes", False: "**no**", None: "-"}[answer["supported"]])
        rows.append(f"| {feature} | {' | '.join(cells)} |")
        if names_of:
            lines = [f"- {', '.join(names)}: {message}\n" for message, names in names_of.items()]
            reasons.append(f"\n{feature}:\n\n{''.join(lines)}")
    return f"{HEAD}{chr(10).join(rows)}\n\n## The messages\n{''.join(reasons)}"


def main(arguments: list[str]) -> int:
    """Write the page, or compare it."""
    text = page()
    if "--write" in arguments:
        PAGE.write_text(text)
    return int(PAGE.read_text() != text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
