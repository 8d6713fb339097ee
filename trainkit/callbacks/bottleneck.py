"""Name the bottleneck of a training: from the step times of every rank and the kernel times of one rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median_low
from typing import Any, Final

from trainkit.config.schema import RunConfig
from trainkit.report.numbers import share

KINDS: Final = ("input", "host", "compute", "memory", "exchange", "straggler")
"""Possible bottlenecks."""

_MATRIX: Final = re.compile(
    r"^(?!triton_(?:poi|red|per)_).*"
    r"((^|[^a-z])(add|bad?d?)?b?mm($|[^a-z])|gemm|conv(?!ert)|attention|flash|fmha|cutlass|xmma|nvjet)"
)
"""Names of compute-bound operations and kernels: matrix products, convolutions, attention. Elementwise kernels and
reductions of inductor have the names of the operations around them; cuBLAS calls its products `nvjet` since Hopper.
"""
_COMMUNICATES: Final = re.compile(r"nccl|gloo|c10d|ProcessGroup|Memcpy")
_SHORT_S: Final = 1e-5
"""CPU operations shorter than this mostly consist of the host's call overhead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTimes:
    """Kernel time per step of one rank, in seconds."""

    compute_s: float = 0.0
    """Products of matrices, convolutions, attention: bound by the arithmetic of the device."""
    memory_s: float = 0.0
    """All others: bound by the memory of the device."""

    @classmethod
    def of(cls, events: Iterable[Any], *, steps: int, on_device: bool) -> KernelTimes:
        """Return the times of the events of `torch.profiler.profile.key_averages()`.

        Args:
            events: the averages.
            steps: recorded steps.
            on_device: whether the kernels of a CUDA device count, or the operations of the CPU.
        """
        compute = memory = 0.0
        for event in events:
            is_kernel = event.device_type.name != "CPU"
            if is_kernel is not on_device or _COMMUNICATES.search(event.key):
                continue
            if on_device and event.is_user_annotation:  # a range of the host, over kernels that are counted themselves
                continue
            seconds = (event.self_device_time_total if on_device else event.self_cpu_time_total) / 1e6
            if not on_device and (not event.key.startswith("aten::") or seconds < _SHORT_S * event.count):
                continue
            if _MATRIX.search(event.key):
                compute += seconds
            else:
                memory += seconds
        return cls(compute_s=compute / steps, memory_s=memory / steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """The measured steps of one rank, in seconds."""

    steps: tuple[float, ...]
    """The duration of each step."""
    inputs: tuple[float, ...]
    """Seconds of each step that wait for input."""
    exchanges: tuple[float, ...]
    """Seconds of each step in the exchange, including the wait for other ranks."""

    def own(self, step: int) -> float:
        """Return the time of a step without exchange and waiting."""
        return self.steps[step] - self.exchanges[step]


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """The shares of a step, by kind of bottleneck."""

    shares: Mapping[str, float]
    """Kind -> its share of a step; the shares sum to 1."""
    slowest: int
    """The rank with the longest computing and reading time."""

    @property
    def bottleneck(self) -> str:
        """The kind with the largest share."""
        return max(self.shares, key=lambda kind: self.shares[kind])


def breakdown(ranks: Sequence[StepTimes], kernels: KernelTimes) -> Breakdown:
    """Divide the time of a step among the possible bottlenecks.

    In each step, all ranks wait for the slowest one: its time above the median rank is `straggler`, and its time in the
    exchange itself is `exchange`. The rest, without the input, is divided by the kernel times; `host` is the time in
    which no kernel ran.

    Args:
        ranks: the steps of each rank, the same number of them.
        kernels: kernel times of one rank.

    Example:
        >>> one = StepTimes(steps=(1.0,), inputs=(0.1,), exchanges=(0.5,))
        >>> other = StepTimes(steps=(1.0,), inputs=(0.1,), exchanges=(0.0,))
        >>> found = breakdown([one, other], KernelTimes(compute_s=0.3))
        >>> found.bottleneck, found.slowest, round(found.shares["compute"], 3)
        ('straggler', 1, 0.3)
    """
    count = len(ranks[0].steps)
    whole = mean(rank.steps[step] for rank in ranks for step in range(count))
    longest = [max(rank.own(step) for rank in ranks) for step in range(count)]
    usual = [median_low([rank.own(step) for rank in ranks]) for step in range(count)]
    exchange = mean(min(rank.exchanges[step] for rank in ranks) for step in range(count))
    straggler = mean(most - one for most, one in zip(longest, usual, strict=True))
    read = mean(median_low([rank.inputs[step] for rank in ranks]) for step in range(count))
    left = max(whole - exchange - straggler - read, 0.0)
    busy = kernels.compute_s + kernels.memory_s
    scale = min(left / busy, 1.0) if busy else 0.0  # recorded operations take longer than others
    seconds = {
        "input": read,
        "host": max(left - busy, 0.0),
        "compute": kernels.compute_s * scale,
        "memory": kernels.memory_s * scale,
        "exchange": exchange,
        "straggler": straggler,
    }
    total = sum(seconds.values()) or 1.0
    slowest = max(range(len(ranks)), key=lambda rank: sum(ranks[rank].own(step) for step in range(count)))
    return Breakdown(shares={kind: value / total for kind, value in seconds.items()}, slowest=slowest)


def remedy(kind: str, cfg: RunConfig, *, device: str, is_stream: bool) -> str:
    """Return the key that may remove a bottleneck, with a value if one is known.

    Example:
        >>> remedy("input", RunConfig(), device="cpu", is_stream=False)
        'loader.num_workers=auto'
    """
    in_process, not_compiled = cfg.loader.num_processes == 0, cfg.compile.mode == "off"
    in_fp32 = device == "cuda" and cfg.precision.get("value") == "fp32"
    more = "strategy, with more devices"
    ways: dict[str, list[tuple[bool, str]]] = {
        "input": [
            (is_stream, "data: a stream is read by the training process"),
            (in_process, "loader.num_workers=auto"),
            (True, "loader.num_workers, with a larger value"),
        ],
        "exchange": [
            (cfg.strategy.get("compression") == "none", "strategy.compression"),
            (True, "batch.global_size: a larger batch exchanges less often"),
        ],
        "straggler": [(True, "strategy.spare_replicas of parameter_server, which does not wait for the slowest")],
        "compute": [(in_fp32, "precision=bf16_mixed"), (True, more)],
        "memory": [(in_fp32, "precision=bf16_mixed"), (not_compiled, "compile.mode=default"), (True, more)],
        "host": [(not_compiled, "compile.mode=default"), (True, "batch.micro_size, with a larger value")],
    }
    return next(way for applies, way in ways[kind] if applies)


def verdict(found: Breakdown, cfg: RunConfig, *, device: str, is_stream: bool) -> str:
    """Return the bottleneck, its share and the key that may remove it, in one line."""
    kind = found.bottleneck
    where = f" (rank {found.slowest})" if kind == "straggler" else ""
    key = remedy(kind, cfg, device=device, is_stream=is_stream)
    return f"bottleneck: {kind}{where}, {share(found.shares[kind])} of a step. What may reduce it: {key}"
