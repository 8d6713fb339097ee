"""The values of the live line at one moment, and their texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from trainkit.report.numbers import clock, compact, count, fixed, share
from trainkit.storage import num_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The values of the live line at one moment; None if unknown."""

    step: int
    num_steps: int
    loss: float | None = None
    """Mean training loss of the latest logged row."""
    metric: tuple[str, float] | None = None
    """Name and value of the latest evaluation."""
    metric_step: int | None = None
    """The step of that evaluation; None: this step."""
    samples_per_s: float | None = None
    data_wait: float | None = None
    """Fraction of the time spent waiting for data, 0 to 1."""
    targets_per_s: float | None = None
    """Throughput in targets of a training whose samples have several targets, such as tokens of a language model."""
    mfu: float | None = None
    """Share of the devices' peak that the operations of the model use."""
    memory: tuple[float, float] | None = None
    """Bytes held by rank 0, now and at the peak."""
    launches: float | None = None
    """Operations that the host starts in a step, of a run that compiles nothing."""
    skipped: int = 0
    """Steps skipped because they were not finite."""
    remaining_s: float = float("inf")

    @property
    def done(self) -> float:
        """The share of the steps that are done, 0 to 1."""
        return self.step / self.num_steps if self.num_steps else 1.0


class LiveLine(Protocol):
    """The interface of a live line."""

    def update(self, reading: Reading) -> None:
        """Update the latest reading; cheap, drawn at the line's own pace."""

    def close(self) -> None:
        """Show the last reading and restore the terminal."""


def plain_text(reading: Reading) -> str:
    """Return a reading as one line of a log.

    Example:
        >>> plain_text(Reading(step=1240, num_steps=5800, loss=0.5, samples_per_s=412_000, data_wait=0.03))
        'step 1,240/5,800   21 %  loss 0.5000  412 k samples/s  data wait 3 %'
    """
    parts = [f"step {count(reading.step)}/{count(reading.num_steps)}", f"{share(reading.done):>5}"]
    if reading.loss is not None:
        parts.append(f"loss {fixed(reading.loss)}")
    if reading.metric is not None:
        step = reading.metric_step
        of = "" if step is None or step == reading.step else f" of step {count(step)}"
        parts.append(f"{reading.metric[0]} {fixed(reading.metric[1])}{of}")
    if reading.samples_per_s is not None:
        parts.append(f"{compact(reading.samples_per_s)} samples/s")
    if reading.data_wait is not None:
        parts.append(f"data wait {share(reading.data_wait)}")
    parts += [text for _, text, _ in _measured(reading)]
    if reading.skipped:
        parts.append(f"{count(reading.skipped)} skipped")
    if reading.remaining_s < float("inf"):
        parts.append(f"{clock(reading.remaining_s)} left")
    return "  ".join(parts)


def _measured(reading: Reading) -> Iterator[tuple[str, str, int]]:
    """Yield the short and the long text of each instrument, and how soon a narrow terminal drops it."""
    if reading.targets_per_s is not None:
        rate = compact(reading.targets_per_s)
        yield f"{rate} targets/s", f"{rate} targets/s", 4
    if reading.mfu is not None:
        yield f"MFU {share(reading.mfu)}", f"MFU {share(reading.mfu)}", 5
    if reading.memory is not None:
        now, peak = (num_bytes(round(one)) for one in reading.memory)
        yield now, f"{now}, peak {peak}", 6
    if reading.launches is not None:
        yield f"{count(round(reading.launches))} launches", f"{count(round(reading.launches))} launches a step", 7


@dataclass(frozen=True, kw_only=True, slots=True)
class _BarPart:
    long: str
    short: str
    style: str
    rank: int
    """Order in which a narrow terminal drops parts: the highest first, 0 never."""


def terminal_parts(reading: Reading, *, step: int, width: int) -> list[tuple[str, str]]:
    """Return the texts beside the bar with their styles: in full if they fit, else short, else without the least
    important.

    Example:
        >>> reading = Reading(step=10, num_steps=20, loss=0.5, samples_per_s=412_000, data_wait=0.03)
        >>> [text for text, _ in terminal_parts(reading, step=12, width=60)]
        ['12/20', 'loss 0.5000', '412 k samples/s', 'data wait 3 %']
        >>> [text for text, _ in terminal_parts(reading, step=12, width=40)]
        ['12/20', 'loss 0.5000', '412 k/s', 'wait 3 %']
        >>> [text for text, _ in terminal_parts(reading, step=12, width=25)]
        ['12/20', 'loss 0.5000']
    """
    parts = _parts(reading, step)
    if _fits([part.long for part in parts], width):
        return [(part.long, part.style) for part in parts]
    for rank in range(7, 0, -1):
        kept = [part for part in parts if part.rank <= rank]
        if _fits([part.short for part in kept], width):
            return [(part.short, part.style) for part in kept]
    return [(part.short, part.style) for part in parts if part.rank == 0]


def _parts(reading: Reading, step: int) -> list[_BarPart]:
    position = f"{count(step)}/{count(reading.num_steps)}"
    parts = [_BarPart(long=position, short=position, style="bold", rank=0)]
    if reading.loss is not None:
        loss = f"loss {fixed(reading.loss)}"
        parts.append(_BarPart(long=loss, short=loss, style="cyan", rank=1))
    if reading.metric is not None:
        name, value = reading.metric[0], fixed(reading.metric[1])
        short = f"{name.rpartition('/')[2]} {value}"
        parts.append(_BarPart(long=f"{name} {value}", short=short, style="green", rank=2))
    if reading.samples_per_s is not None:
        rate = compact(reading.samples_per_s)
        parts.append(_BarPart(long=f"{rate} samples/s", short=f"{rate}/s", style="", rank=4))
    if reading.data_wait is not None:
        wait, style = share(reading.data_wait), "yellow" if reading.data_wait > 0.2 else "dim"
        parts.append(_BarPart(long=f"data wait {wait}", short=f"wait {wait}", style=style, rank=5))
    for shown, text, rank in _measured(reading):
        parts.append(_BarPart(long=text, short=shown, style="dim", rank=rank))
    if reading.skipped:
        skipped = f"{count(reading.skipped)} skipped"
        parts.append(_BarPart(long=skipped, short=skipped, style="yellow", rank=1))
    if reading.remaining_s < float("inf"):
        left = clock(reading.remaining_s)
        parts.append(_BarPart(long=f"{left} left", short=left, style="magenta", rank=3))
    return parts


def _fits(texts: list[str], width: int) -> bool:
    return sum(map(len, texts)) + 2 * (len(texts) - 1) <= width
