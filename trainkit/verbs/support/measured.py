"""The skeleton of the verbs that measure trainings: refusals, the folder and the results, progress lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Protocol

from trainkit.cluster.local import VARIABLE, launch_problems
from trainkit.config.composition import Composition
from trainkit.config.grammar import COMMAND_LINE
from trainkit.config.values import path_rule
from trainkit.errors import ConfigError, Problem, refuse
from trainkit.files import reporting, write_json_atomically
from trainkit.run.signals import raised_stops
from trainkit.trainer.ownership import new_folder
from trainkit.verbs.support.call import Call


def out_problems(call: Call) -> Iterator[Problem]:
    """Yield the problem of `--out`: an invalid path, a file, or a folder with files."""
    out = call.flags.get("out")
    if out is not None and (rule := path_rule(out) or _occupied(Path(out).expanduser())):
        yield call.problem("out", rule)


def _occupied(path: Path) -> str | None:
    if path.is_dir() and any(path.iterdir()):
        return "is a folder with files. Give a new one."
    return "is a file. Give a folder." if path.exists() and not path.is_dir() else None


def training_problems(verb: str, composition: Composition) -> Iterator[Problem]:
    """Yield the problems of a config that is not one training on this machine."""
    if composition.asks_for_folds:
        value = composition.values["cv"]["folds"]
        yield composition.problem("cv.folds", "starts several trainings. Give cv.fold too.", value=value)
    if composition.submits_single_runs:
        rule = f"passes runs to another system, and {verb} measures this machine. Leave it out."
        yield Problem(key="cluster", rule=rule, origin=COMMAND_LINE)
    if (resumed := composition.values["resume"]) is not None:
        rule = f"has no effect: {verb} trains from the start. Leave it out, or load weights with init_from=CHECKPOINT."
        yield composition.problem("resume", rule, value=resumed)


def begin(call: Call, action: str, problems: Iterable[Problem] = ()) -> Composition:
    """Compose the one training that a verb measures.

    Args:
        call: the call.
        action: what each process of a launcher would do.
        problems: problems of the verb's own rules.

    Raises:
        ConfigError: those, and the problems of flags, launch and config.
    """
    problems = [
        *problems,
        *out_problems(call),
        *launch_problems(call.verb, action, f"{call.verb} without the launcher ({VARIABLE}=none)"),
    ]
    try:
        composition = call.compose()
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    refuse([*problems, *training_problems(call.verb, composition)])
    return composition


@contextmanager
def result_folder(verb: str, out: str | None) -> Iterator[Path]:
    """Create the folder of the results; if it is empty at the end of the block, remove it, unless it existed before.

    Raises:
        StorageError: it cannot be created. TerminatedError, HangupError: a stop signal was received.
    """
    stamp = datetime.now().astimezone().strftime("%Y-%m-%d_%H-%M-%S")
    folder = Path("outputs") / verb / stamp if out is None else Path(out).expanduser()
    was_there = out is not None and folder.exists()
    with reporting(folder):
        if out is None:
            folder = new_folder(folder)
        else:
            folder.mkdir(parents=True, exist_ok=True)
    try:
        with raised_stops():
            yield folder
    finally:
        if not was_there:
            with suppress(OSError):
                folder.rmdir()  # not if it contains any file


class Document(Protocol):
    """The content of the JSON of a measurement: a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def notes(self) -> Sequence[str]:
        """Notes for the user."""


@dataclass(frozen=True, kw_only=True)
class Results:
    """The results of a measurement."""

    content: Document
    lines: Iterable[str]
    """The text of the results."""
    picture: str | None = None
    """The picture, `bench` for `draw_bench`; None: nothing is drawn."""
    title: str = ""
    """Its title."""
    drawn: tuple[str, ...] = ()
    """The values of the document that it shows."""
    is_failed: bool = False
    """Whether a measurement failed, or found nothing."""


def measure(call: Call, name: str, work: Callable[[], Results | None], *, keeps: bool = True) -> int:
    """Measure, write the results into their folder, and print them; return the exit code.

    Args:
        call: its flag `out` names the folder; its flag `json` asks for the content instead of the lines.
        name: the name of the files: NAME.json and NAME.png.
        work: measures; None: it failed without results.
        keeps: whether results are written without `--out`, too.
    """
    out = call.flags.get("out")
    with result_folder(call.verb, out) if keeps or out is not None else nullcontext() as folder:
        results = work()
        if results is None:
            return 1
        content = asdict(results.content)
        if folder is not None:
            with reporting(folder):
                write_json_atomically(folder / f"{name}.json", content)
                if results.picture is not None:
                    from trainkit.report import plots  # noqa: PLC0415 - imports matplotlib

                    values = {key: content[key] for key in results.drawn}
                    getattr(plots, f"draw_{results.picture}")(folder / f"{name}.png", title=results.title, **values)
        tail = [*(f"  note: {note}" for note in results.content.notes), *([f"  folder  {folder}"] if folder else [])]
        call.show(content, [*results.lines, *([""] if tail else []), *tail])
    return int(results.is_failed)


def line_printer(verb: str) -> Callable[[str], None]:
    """Return a function that prints a progress line of a verb to standard error."""

    def print_line(message: str) -> None:
        sys.stderr.write(f"{verb}: {message}\n")
        sys.stderr.flush()

    return print_line
