"""The folder of an exported model: written next to its final place, then moved there as a whole.

    model.safetensors   the file of the format
    config.yaml         the node that builds the model; size and SHA-256 of each file
    README.md           the model card
    .owner              the token of the run: a later export of this run may replace the folder

At any moment, and after any crash, a reader sees either a complete export or none.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from trainkit.errors import UnreadableError
from trainkit.exporting.formats import Format
from trainkit.exporting.trained import TrainedModel
from trainkit.files import MAX_YAML_BYTES, naming, num_bytes, open_regular, parse_yaml, read_text, size_of, sync_folder
from trainkit.trainer.checkpoint.tensors import write_bytes
from trainkit.trainer.manifest import FileRecord
from trainkit.trainer.ownership import MARK, OwnershipToken, free_name, print_notice

CONFIG: Final = "config.yaml"
CARD: Final = "README.md"
BEST: Final = "best"
"""Name of the subfolder with the best weights, in the folder of the last weights."""
_BESIDE: Final = (BEST, "average")
"""Names of all subfolders of the folder of the last weights, each named after its weights."""
_CHUNK: Final = 8 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """A written export."""

    folder: Path
    num_bytes: int
    """Total size of the files."""
    seconds: float
    notes: tuple[str, ...] = ()
    """Sentences for the screen: how the files were checked, which sizes they take."""

    def to_result(self) -> dict[str, Any]:
        """Return the entries of result.json."""
        return {"model": str(self.folder), "model_bytes": self.num_bytes, "model_seconds": self.seconds}

    def __add__(self, other: Exported) -> Exported:
        """Count another export, of the same folder."""
        total = self.num_bytes + other.num_bytes
        notes = tuple(dict.fromkeys((*self.notes, *other.notes)))
        return Exported(folder=self.folder, num_bytes=total, seconds=self.seconds + other.seconds, notes=notes)


def write_export(
    last: TrainedModel, form: Format, folder: Path, owner: OwnershipToken, *, beside: Sequence[TrainedModel] = ()
) -> Exported:
    """Export a model into a folder, replacing an earlier export of the run.

    Args:
        last: the model with the last weights.
        form: the module of the format.
        folder: the folder, whose parent exists; if another run owns it, FOLDER-2 is used.
        owner: the run.
        beside: the same model with other weights, each for the subfolder named by its `which`.

    Raises:
        CheckpointError: the weights are damaged, or the format refuses the model; nothing has changed.
        StorageError: a file cannot be written, for example because the disk is full; nothing has changed.
    """
    folder = _free_or_own(folder, owner)
    with naming(folder), _in_place_of(folder, owner) as draft:
        done = _written(last, form, draft)
        for other in beside:
            owner.make(draft / other.which)
            done += _written(other, form, draft / other.which)
    return replace(done, folder=folder)


def _free_or_own(folder: Path, owner: OwnershipToken) -> Path:
    """Return the first of FOLDER, FOLDER-2 ... that is absent, or an earlier export of this run."""
    names = itertools.chain([folder], (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2)))
    found = next(one for one in names if not os.path.lexists(one) or owner.owns(one))
    if found != folder and not os.path.lexists(found):
        print_notice(f"{folder} was not written by this run: it is left where it is, and {found} is used.")
    return found


def _written(trained: TrainedModel, form: Format, draft: Path) -> Exported:
    began = time.perf_counter()
    written = form.write(trained, draft)
    paths = sorted(path for path in draft.rglob("*") if path.is_file() and path.name != MARK)
    found = {path.relative_to(draft).as_posix(): path for path in paths}
    files = {name: written.files.get(name) or _record(path) for name, path in found.items()}
    config = {
        "format": 1,
        "model": dict(trained.cfg.model),
        "checkpoint": trained.which,
        "step": trained.step,
        **trained.facts,
        "files": {name: asdict(record) for name, record in files.items()},
    }
    write_bytes(draft / CONFIG, yaml.safe_dump(config, sort_keys=False, allow_unicode=True).encode())
    write_bytes(draft / CARD, model_card(trained, files, loading=form.LOADING, notes=written.notes).encode())
    sync_folder(draft)
    num_bytes = sum(record.num_bytes for record in files.values())
    seconds = time.perf_counter() - began
    return Exported(folder=draft, num_bytes=num_bytes, seconds=seconds, notes=written.notes)


def _record(path: Path) -> FileRecord:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while piece := file.read(_CHUNK):
            digest.update(piece)
    return FileRecord(num_bytes=size_of(path), sha256=digest.hexdigest())


@contextmanager
def _in_place_of(final: Path, owner: OwnershipToken) -> Iterator[Path]:
    """Yield a new folder; it replaces `final` if the block ends without an error, else it is deleted."""
    hidden = f".{final.name}"
    owner.remove_tree(final.with_name(f"{hidden}.new"))  # left by a kill
    _delete(final.with_name(f"{hidden}.old"), owner, final)
    draft, old = free_name(final.with_name(f"{hidden}.new")), free_name(final.with_name(f"{hidden}.old"))
    owner.make(draft)
    try:
        yield draft
        if os.path.lexists(final):
            final.rename(old)
        draft.rename(final)
        sync_folder(final.parent)
    finally:
        owner.remove_tree(draft)
    _delete(old, owner, final)


def _delete(folder: Path, owner: OwnershipToken, final: Path) -> None:
    """Delete an earlier export; files that no export wrote are kept in `NAME.aside`."""
    if not owner.owns(folder):
        return
    left = [
        f"{within}/{name}"
        for within in _BESIDE
        for name in owner.remove(folder / within, _written_names(folder / within))
    ]
    left += [name for name in owner.remove(folder, _written_names(folder)) if name not in _BESIDE]
    if left:
        kept = folder.rename(free_name(final.with_name(f"{final.name}.aside")))
        print_notice(
            f"{kept} holds the files of {final} that this run did not write; {final} is replaced: {', '.join(left)}."
        )


def _written_names(folder: Path) -> re.Pattern[str]:
    """Return a pattern of the file names that an export lists as its own."""
    try:
        content = parse_yaml(read_text(folder / CONFIG, limit=MAX_YAML_BYTES))
    except (UnreadableError, ValueError):
        content = None
    files = content.get("files") if isinstance(content, Mapping) else None
    names = [CONFIG, CARD, *(str(name) for name in (files if isinstance(files, Mapping) else ()))]
    return re.compile("|".join(re.escape(name) for name in names))


_SHOWN: Final = ("model", "data", "objective", "optimizer", "schedule", "precision", "epochs", "steps")
"""Parts of the config that the card shows."""


def model_card(
    trained: TrainedModel, files: Mapping[str, FileRecord], *, loading: str, notes: Sequence[str] = ()
) -> str:
    """Return the model card as Markdown; `loading` is the section of the format, `notes` are sentences for it."""
    facts, cfg = trained.facts, trained.cfg
    rows = {
        "weights": f"the {trained.which} ones, of step {trained.step:,}",
        "recipe": cfg.recipe,
        "run": facts.get("run"),
        "command": _code(facts.get("command")),
        "fingerprint": _code(facts.get("fingerprint")),
        "seed": cfg.seed,
        "files": ", ".join(f"{name} ({num_bytes(record.num_bytes)})" for name, record in files.items()),
    }
    table = "".join(f"| {name} | {_cell(value)} |\n" for name, value in rows.items() if value is not None)
    return "\n".join(
        [
            f"# {cfg.name}\n",
            f"| | |\n|---|---|\n{table}",
            *_metrics(facts.get("metrics"), of=trained),
            f"## Loading\n\n{loading}",
            *(f"{note}\n" for note in notes),
            "## Training\n",
            f"```yaml\n{_shown(trained)}```\n",
        ]
    )


def _metrics(metrics: Any, *, of: TrainedModel) -> list[str]:
    if not isinstance(metrics, Mapping) or not metrics or of.which != "last":
        return []
    rows = "".join(f"| {_cell(name)} | {value:.6g} |\n" for name, value in metrics.items() if value is not None)
    return [f"## Metrics\n\n| at the end of the run | |\n|---|---|\n{rows}"]


def _shown(trained: TrainedModel) -> str:
    values = trained.cfg.to_dict()
    batch = {name: values["batch"][name] for name in ("global_size", "micro_size")}
    shown = {**{name: values[name] for name in _SHOWN}, "batch": batch}
    return yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)


def _code(text: Any) -> str | None:
    return None if text is None else f"`{text}`"


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
