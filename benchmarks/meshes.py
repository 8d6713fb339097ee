"""Train on every mesh of 2, 4 and 8 ranks, and resume on another mesh: `python benchmarks/meshes.py [--ranks 2 4]`.

Three language models of two blocks, each on every mesh that it can have, in three precisions; then what a training may
have (`benchmarks/axes.py`) on three and four axes; then random pairs of meshes, from one of which a training goes to
the other in the middle of an epoch. The results are written into `benchmarks/results/meshes.md`, where what was not
tried keeps its line; exits with 1 if one is not the training of one device.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"

from benchmarks.axes import AXES, CLOSE, FEATURES, error_of
from tests.contract.meshes import LAYOUTS, OF_16_RANKS, SIZES, STEPS, TOLERANCES, compare, draw_pairs, resume_error
from tests.support.pool import Pool

RESULTS: Final = ROOT / "benchmarks/results/meshes.md"
TEXT: Final = f"""# Every mesh of 2, 4 and 8 ranks

`python benchmarks/meshes.py` makes all lines, `--only "GPT-2 1 x 1 x 1, context 8"` some of them: {{cores}} cores
({{machine}}), Gloo. Each line has the date and the commit of its run; {{verdict}}

Three language models of two blocks: `Gpt`, and a Llama and a GPT-2 that transformers makes from their configs, with
`use_cache=false`, and with `nn.RMSNorm` in the place of Llama's norms, which compute in float32 in any precision.
Batches of 8 sequences in shards of 2, so that meshes of 8 have idle ranks; clipping; {STEPS} steps, which are two and a
half epochs. The layers of GPT-2 that compute queries, keys and values at once are not cut.

- *begins*: the initial weights on each rank have the bits of those on one device, in each precision.
- *fp64*: the largest relative error of a parameter after the last step, and of a loss, against the plain loop, which
  imports nothing of trainkit. AdamW, for GPT-2 SGD (the bias of its keys has no gradient). Held to
  {TOLERANCES["fp64"]:g}.
- *fp32*, *bf16_mixed*: the same against one device in that precision, with SGD: AdamW makes steps of the rounding of
  gradients near zero. Held to 8 eps sqrt(steps): {TOLERANCES["fp32"]:.1e} and {TOLERANCES["bf16_mixed"]:.1e}.

| model | ranks | replicate x shard x tensor, stages, context | begins | fp64 | fp32 | bf16_mixed | date | commit |
|---|---:|---|---|---:|---:|---:|---|---|
"""
FEATURED: Final = """
## What a training has, on three and four axes

Each axis has two ranks; `--features` makes these lines alone. The largest relative error of a parameter, a buffer or an
average after the last of 2 to 6 steps, and of a loss, on any rank: against the plain loop in fp64, against one device
in other precisions and with dropout. In fp64 it is held to 1e-12, in fp32 to 3e-6, else to 0.05. `refused`: by this
key, with the reason, before anything starts.

"""
RESUMED: Final = f"""
## From one mesh to another

A training is saved on the first mesh in the middle of an epoch, and continued on the second one to step {STEPS}, in
fp64; the error is that against the plain loop, which nobody stopped. The pairs are random.

| model | from | to | at step | error | date | commit |
|---|---|---|---:|---:|---|---|
"""


def main() -> int:
    """Try the meshes, and write their lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", choices=(*SIZES, 16), default=SIZES, help="sizes of the meshes")
    parser.add_argument("--only", nargs="*", metavar="LINE", help="lines of tables, as they name them")
    parser.add_argument("--precisions", nargs="+", choices=[*TOLERANCES], default=[*TOLERANCES])
    parser.add_argument("--pairs", type=int, default=20, help="pairs of meshes")
    parser.add_argument("--seed", type=int, default=datetime.now().astimezone().date().toordinal(), help="of the pairs")
    parser.add_argument("--features", action="store_true", help="only trainings on three and four axes")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows, featured, resumed = earlier(RESULTS.read_text() if RESULTS.exists() else "")
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    stamp = f"{datetime.now().astimezone().date()} | {commit} |"
    every = [*LAYOUTS, *OF_16_RANKS]
    chosen = [layout for layout in every if layout[1].ranks in options.ranks and not options.features]
    if options.only is not None:
        chosen = [layout for layout in every if " ".join(map(str, layout)) in options.only]
    is_whole = options.only is None and 8 in options.ranks
    named = [name for name in FEATURES if options.features or is_whole or name in (options.only or ())]
    pairs = draw_pairs(0 if options.features else options.pairs, options.seed, tuple(options.ranks))
    failed = 0
    with Pool() as pool:
        for family, mesh in chosen:
            comparisons = {precision: compare(pool, family, mesh, precision) for precision in options.precisions}
            begins = all(comparison.begins_alike for comparison in comparisons.values())
            failed += not begins or any(comparison.error > TOLERANCES[name] for name, comparison in comparisons.items())
            errors = " | ".join(f"{comparisons[name].error:.1e}" if name in comparisons else "" for name in TOLERANCES)
            row = f"| {family} | {mesh.ranks} | {mesh} | {'alike' if begins else 'OTHERWISE'} | {errors} | {stamp}"
            rows[family, str(mesh)] = row
            print(row, flush=True)
            write(rows, featured, resumed)
        for name in named:
            cells = []
            for axes in AXES:
                error, refused = error_of(pool, axes, name)
                failed += error is not None and error > CLOSE[FEATURES[name].precision]
                cells.append(f"refused: {refused.partition(': ')[0]}" if error is None else f"{error:.1e}")
            featured[name] = f"| {name} | {' | '.join(cells)} | {stamp}"
            print(featured[name], flush=True)
            write(rows, featured, resumed)
        for pair in pairs:
            with tempfile.TemporaryDirectory() as folder:
                error = resume_error(pool, pair, Path(folder))
            failed += error > TOLERANCES["fp64"]
            start = f"| {pair.family} | {pair.before} | {pair.after} | {pair.step} |"
            resumed[start] = f"{start} {error:.1e} | {stamp}"
            print(resumed[start], flush=True)
            write(rows, featured, resumed)
    return int(failed > 0)


def earlier(text: str) -> tuple[dict[tuple[str, str], str], dict[str, str], dict[str, str]]:
    """Return the lines of earlier runs: (model, mesh) -> line, name of a training -> line, name of a resume -> line."""
    lines = re.finditer(r"^\| (\S+) \| \d+ \| ([^|]+) \|.*", text, re.MULTILINE)
    rows = {(match[1], match[2]): match[0] for match in lines}
    resumes = re.finditer(r"^(\| \S+ \| \d[^|]+x[^|]+\|[^|]+x[^|]+\| \d+ \|).*", text, re.MULTILINE)
    featured = {name: line for line in text.splitlines() for name in FEATURES if line.startswith(f"| {name} |")}
    return rows, featured, {match[1]: match[0] for match in resumes}


def write(rows: Mapping[tuple[str, str], str], featured: Mapping[str, str], resumed: Mapping[str, str]) -> None:
    """Write the file with all lines."""
    layouts = [rows[key] for family, mesh in [*LAYOUTS, *OF_16_RANKS] if (key := (family, str(mesh))) in rows]
    verdict = f"{len(layouts)} meshes and {len(resumed)} resumes."
    head = TEXT.format(cores=os.cpu_count(), machine=platform.machine(), verdict=verdict)
    table = [f"| training | {' | '.join(AXES)} | date | commit |", "|---|---|---|---|---|---|"]
    table += [featured[name] for name in FEATURES if name in featured]
    parts = [FEATURED + "\n".join(table), RESUMED + "\n".join(resumed.values())]
    RESULTS.write_text("\n".join([head + layouts[0], *layouts[1:], *parts, ""]))


if __name__ == "__main__":
    sys.exit(main())
