"""Name the bottleneck of a training: from the parts of its steps on every rank, and the kernels of one rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median_low
from typing import Any, Final

from trainkit.config.schema import RunConfig
from trainkit.report.numbers import share

KINDS: Final = ("input", "host", "compute", "memory", "exchange", "straggler")
"""What may bind a training."""

_MATRIX: Final = re.compile(r"(^|[^a-z])(add|bad?d?)?b?mm($|[^a-z])|gemm|conv|attention|flash|fmha|cutlass|xmma")
"""Names of operations and kernels that compute much for each byte they move: products of matrices."""
_COMMUNICATES: Final = re.compile(r"nccl|gloo|c10d|ProcessGroup|Memcpy")
_SHORT_S: Final = 1e-5
"""An operation of the CPU that takes less is mostly the host's work to call it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTimes:
    """Seconds a step of the operations of one rank."""

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
    """Its part for the input."""
    exchanges: tuple[float, ...]
    """Its part for the exchange, with the wait for other ranks."""

    def own(self, step: int) -> float:
        """Return the time of a step in which this rank did not exchange or wait."""
        return self.steps[step] - self.exchanges[step]


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """The shares of a step."""

    shares: Mapping[str, float]
    """Kind -> its share of a step; together 1."""
    slowest: int
    """The rank that computes and reads longest."""

    @property
    def bottleneck(self) -> str:
        """The kind with the largest share."""
        return max(self.shares, key=lambda kind: self.shares[kind])


def breakdown(ranks: Sequence[StepTimes], kernels: KernelTimes) -> Breakdown:
    """Divide a step into what may bind it.

    In each step, the rank that takes longest decides when all go on: what it takes more than the median rank is
    `straggler`, and what it spends in the exchange itself is `exchange`. What is left beside the input is divided by
    the times of the kernels; `host` is the time in which none ran.

    Args:
        ranks: the steps of each rank, the same number of them.
        kernels: of one rank.

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
    """Return the key that may move a bottleneck, with a value where there is one.

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
    """Return the bottleneck, its share and the key that may move it, in one line."""
    kind = found.bottleneck
    where = f" (rank {found.slowest})" if kind == "straggler" else ""
    key = remedy(kind, cfg, device=device, is_stream=is_stream)
    return f"bottleneck: {kind}{where}, {share(found.shares[kind])} of a step. What may move it: {key}"
