"""Make the gallery: python scripts/website/gallery.py [RUN RUN RUN ...].

The run folders of one recipe with three or more seeds become the record `docs/gallery/RECIPE.json`, with a picture and
the report of the first seed beside it. Then docs/gallery.md is written from all records. Without run folders only the
page is written.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[2]
CARDS: Final[Mapping[str, Mapping[str, str]]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
FEWEST_SEEDS: Final = 3
_OWN: Final = ("seed", "hydra")
"""The keys in which the runs of a card differ."""
_VERSION: Final = re.compile(r"[0-9][\w.+]{0,40}")
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_DATE: Final = re.compile(r"\d{4}-\d{2}-\d{2}")
_HEAD: Final = """\
A card describes runs of a recipe with several seeds. Its figures, times and hashes come from `result.json` and
`environment.json` of the runs, its picture from the run of the first seed. The hashes are those that the version of
that day gave; a later version may give others."""
_HOW: Final = """\
## Make a card

Train the recipe with three seeds or more, and give the run folders to the script. It refuses runs that have not
finished, or whose configs or machines differ. A new recipe needs an entry in
`scripts/website/gallery.yaml`.

<!-- composes -->
```bash
for seed in 0 1 2; do python -m trainkit recipe=digits seed=$seed hydra.run.dir=outputs/digits-$seed; done
python scripts/website/gallery.py outputs/digits-*
```"""


class RefusedError(ValueError):
    """Runs or a record that make no card."""


@dataclass(frozen=True, kw_only=True)
class SeedRun:
    """What a card shows of one run."""

    seed: int
    figure: float
    """The metric of the card at the end of the training."""
    seconds: float
    """Seconds of the training, evaluations included."""
    steps: int
    weights_sha256: str


@dataclass(frozen=True, kw_only=True)
class Card:
    """The measured facts of a card."""

    recipe: str
    metric: str
    date: str
    """Day of the first run, YYYY-MM-DD."""
    cores: int
    gpus: int
    python: str
    torch: str
    trainkit: str
    runs: tuple[SeedRun, ...]

    @classmethod
    def read(cls, path: Path) -> Card:
        """Read a record.

        Raises:
            RefusedError: it has another form.
        """
        try:
            values = json.loads(path.read_text())
            runs = tuple(SeedRun(**run) for run in values.pop("runs"))
            if values.pop("version") != 1:
                raise RefusedError(f"{path.name}: the version must be 1.")
            card = cls(runs=runs, **values)
            texts = [card.python, card.torch, card.trainkit]
            numbers = [card.cores, card.gpus, *(value for run in runs for value in (run.seed, run.steps))]
            is_fine = (
                card.recipe in CARDS
                and card.metric == CARDS[card.recipe]["metric"]
                and len({run.seed for run in runs}) >= FEWEST_SEEDS
                and _DATE.fullmatch(card.date)
                and all(_VERSION.fullmatch(text) for text in texts)
                and all(_HASH.fullmatch(run.weights_sha256) for run in runs)
                and all(type(value) is int for value in numbers)
                and all(type(value) is float for run in runs for value in (run.figure, run.seconds))
            )
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise RefusedError(f"{path.name} is no record of a card: {error!r}.") from error
        if not is_fine:
            raise RefusedError(f"{path.name} is no record of a card: a value has another form.")
        return card

    def write(self, path: Path) -> None:
        """Write the record."""
        path.write_text(json.dumps({"version": 1, **asdict(self)}, indent=2) + "\n")


def card_of(folders: Sequence[Path]) -> Card:
    """Return the card of the runs of one recipe, one folder a seed.

    Raises:
        RefusedError: a run has not finished, the runs are not of one recipe and one machine, or are too few.
    """
    facts = [_facts(folder) for folder in folders]
    first = facts[0]
    for folder, fact in zip(folders, facts, strict=True):
        if fact["status"] != "finished":
            raise RefusedError(f"{folder}: the run is {fact['status']}, not finished.")
        for key in ("config", "machine"):
            if fact[key] != first[key]:
                raise RefusedError(f"{folder} has another {key} than {folders[0]}.")
    if first["recipe"] not in CARDS:
        raise RefusedError(f"{folders[0]}: recipe={first['recipe']} has no entry in gallery.yaml.")
    metric = CARDS[first["recipe"]]["metric"]
    runs = {
        fact["seed"]: SeedRun(
            seed=fact["seed"],
            figure=float(fact["metrics"][metric]),
            seconds=round(fact["seconds"], 1),
            steps=fact["steps"],
            weights_sha256=fact["weights_sha256"],
        )
        for fact in facts
    }
    if len(runs) < FEWEST_SEEDS:
        raise RefusedError(f"{len(runs)} seeds are too few for a spread: give {FEWEST_SEEDS} or more.")
    in_order = tuple(runs[seed] for seed in sorted(runs))
    return Card(recipe=first["recipe"], metric=metric, date=first["date"], runs=in_order, **first["machine"])


def _facts(folder: Path) -> dict[str, Any]:
    """Read what a card needs of a run folder."""
    result = json.loads((folder / "result.json").read_text())
    environment = json.loads((folder / "environment.json").read_text())
    config = yaml.safe_load((folder / "resolved.yaml").read_text())
    devices, packages = environment["devices"], environment["packages"]
    return {
        **{key: result[key] for key in ("status", "metrics", "seconds", "steps", "weights_sha256")},
        "recipe": config["recipe"],
        "seed": config["seed"],
        "date": environment["started"][:10],
        "config": {key: value for key, value in config.items() if key not in _OWN},
        "machine": {
            "cores": devices["cores"],
            "gpus": devices["gpus"],
            "python": environment["python"],
            "torch": packages["torch"],
            "trainkit": packages["trainkit"],
        },
    }


def clean_report(folder: Path, name: str) -> str:
    """Return the report of a run without the paths, the host and the pid of the machine that made it."""
    environment = json.loads((folder / "environment.json").read_text())
    page = (folder / "report.html").read_text().replace(str(folder.resolve()), f"outputs/{name}")
    for key in ("cwd", "host", "pid"):
        page = page.replace(json.dumps([key, str(environment[key])], separators=(",", ":")), f'["{key}",""]')
    return page


def page(cards: Sequence[Card]) -> str:
    """Return the Markdown of docs/gallery.md."""
    missing = sorted(path.parent.name for path in (ROOT / "recipes").glob("*/recipe.yaml"))
    missing = [name for name in missing if name not in {card.recipe for card in cards}]
    parts = ["# Gallery", _HEAD, *map(_card, sorted(cards, key=lambda card: card.recipe))]
    if missing:
        parts += ["## Not measured with several seeds", f"{', '.join(missing)}: see their pages in `recipes/`."]
    return "\n\n".join([*parts, _HOW]) + "\n"


def _card(card: Card) -> str:
    """Return the Markdown of a card."""
    fixed, name = CARDS[card.recipe], card.recipe
    figures = [run.figure for run in card.runs]
    spread = f"{statistics.mean(figures):.4g} ± {statistics.stdev(figures):.2g}"
    each_figure = ", ".join(f"{run.figure:.4g} (`seed={run.seed}`)" for run in card.runs)
    seconds = sorted(run.seconds for run in card.runs)
    machine = f"{card.cores} CPU cores" if not card.gpus else f"{card.cores} CPU cores, {card.gpus} GPUs"
    hashes = "<br>".join(f"`{run.weights_sha256}` (`seed={run.seed}`)" for run in card.runs)
    command = " ".join(
        filter(None, ["python -m trainkit", f"recipe={name}", fixed.get("arguments"), f"seed={card.runs[0].seed}"])
    )
    rows = {
        "task": fixed["task"],
        "data": fixed["data"],
        f"`{card.metric}`": f"**{spread}**, mean and standard deviation of {len(figures)} seeds: {each_figure}",
        "which is": fixed["is"],
        "published": fixed["published"],
        "machine": f"{machine}; Python {card.python}, torch {card.torch}, trainkit {card.trainkit}; {card.date}",
        "time": f"{seconds[0]:g} to {seconds[-1]:g} s for {card.runs[0].steps:,} steps",
        "SHA-256 of the weights": hashes,
        "command": f"`{command}`",
        "more": f"[report of the first seed](gallery/{name}.html) · [recipe](../recipes/{name}/README.md)",
    }
    lines = "\n".join(f"| {key} | {value.strip()} |" for key, value in rows.items())
    return f"## {name}\n\n![{fixed['shows']}](gallery/{name}.png)\n\n| | |\n|---|---|\n{lines}"


def records(folder: Path) -> list[Card]:
    """Read all records of a folder."""
    return [Card.read(path) for path in sorted(folder.glob("*.json"))]


def main(arguments: Sequence[str]) -> None:
    """Write a record of the runs, if any are given, and the page."""
    folder = ROOT / "docs/gallery"
    folder.mkdir(exist_ok=True)
    if arguments:
        runs = sorted(map(Path, arguments))
        card = card_of(runs)
        first = min(runs, key=lambda run: int(_facts(run)["seed"]))
        (folder / f"{card.recipe}.html").write_text(clean_report(first, f"{card.recipe}-{card.runs[0].seed}"))
        shutil.copy(first / CARDS[card.recipe]["picture"], folder / f"{card.recipe}.png")
        card.write(folder / f"{card.recipe}.json")
    (ROOT / "docs/gallery.md").write_text(page(records(folder)))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (RefusedError, OSError) as error:
        sys.exit(f"gallery: {error}")
