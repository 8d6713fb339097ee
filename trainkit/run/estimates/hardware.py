"""The group `hardware`: performance and price of one device, for the plan, and for the MFU of a run.

Each figure has its source and date. The group changes neither numbers nor fingerprints.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Final

import torch

from trainkit.config.schema import RunConfig
from trainkit.config.targets.build import build
from trainkit.config.yaml_files import read_document, shipped_conf
from trainkit.errors import ConfigError, Problem, refuse
from trainkit.fields import above, at_least, cosmetic, unit

FORMATS: Final = ("fp64", "fp32", "tf32", "bf16", "fp16")
"""The number formats of `tflops`."""
_COMPUTED_IN: Final = {"bf16_mixed": "bf16", "fp16_mixed": "fp16"}
"""Precision -> the format of its matrix products, if the two have different names."""
_INSTEAD: Final = {"tf32": "fp32", "bf16": "fp32", "fp16": "fp32", "fp64": None, "fp32": None}
"""Format -> the format that a device without it uses instead."""

_REPRODUCIBLE_BYTES: Final = 2 * 32 * 2**20
"""Two workspaces of the size that `CUBLAS_WORKSPACE_CONFIG=:4096:8` sets: eight times 4096 KiB."""


@dataclass(frozen=True, kw_only=True)
class Band:
    """A lower and an upper bound."""

    low: Annotated[float, above(0), cosmetic]
    """The lower bound."""
    high: Annotated[float, above(0), cosmetic]
    """The upper bound."""

    def __post_init__(self) -> None:
        if self.low > self.high:
            rule = f"is above high={self.high:g}. Swap the two."
            raise ConfigError([Problem(key="low", value=self.low, rule=rule)])

    def times(self, factor: float) -> Band:
        """Return both bounds multiplied by a number."""
        return Band(low=self.low * factor, high=self.high * factor)

    @property
    def middle(self) -> float:
        """The geometric mean of the bounds.

        Example:
            >>> Band(low=1.0, high=4.0).middle
            2.0
        """
        return math.sqrt(self.low * self.high)


@dataclass(frozen=True, kw_only=True)
class Link:
    """The link between two devices."""

    gb_s: Annotated[float, above(0), cosmetic, unit("10^9 bytes/s")]
    """10^9 bytes a second that a device sends, while it receives as many."""
    latency_us: Annotated[float, at_least(0), cosmetic, unit("microseconds")] = 10.0
    """Microseconds of the smallest message."""


Say = Callable[[str], None]
"""Function that receives a line of progress."""


class HardwareChoice(ABC):
    """A choice of the group `hardware`."""

    @abstractmethod
    def here(self, say: Say | None = None) -> Hardware:
        """Return the figures of the hardware; with `say`, they may be measured, with a line for each."""


@dataclass(frozen=True, kw_only=True)
class Hardware(HardwareChoice):
    """One kind of device, its links and its price.

    Example:
        >>> link = Link(gb_s=450.0)
        >>> gpu = Hardware(name="x", memory_gib=80.0, memory_gb_s=3350.0, tflops={"fp32": 67.0}, within_host=link,
        ...     between_hosts=link)
        >>> gpu.peak_flops("bf16_mixed"), gpu.memory_bytes
        (67000000000000.0, 85899345920)
    """

    name: Annotated[str, cosmetic]
    """Name of the hardware, for the plan."""
    driver_names: Annotated[tuple[str, ...], cosmetic] = ()
    """Name of the device in drivers: a run on such a GPU uses these rates as the peak of its MFU, without
    `hardware`.
    """
    memory_gib: Annotated[float, above(0), cosmetic, unit("GiB")]
    """GiB of memory of a device."""
    workspace_mib: Annotated[float | None, at_least(0), cosmetic, unit("MiB")] = None
    """MiB of that memory in which torch keeps the workspaces of cuBLAS from the first matrix product on; null: unknown.
    """
    memory_gb_s: Annotated[float, above(0), cosmetic, unit("10^9 bytes/s")]
    """10^9 bytes a second of that memory."""
    tflops: Annotated[Mapping[str, Annotated[float, above(0)]], cosmetic, unit("10^12 operations/s")]
    """10^12 operations a second of dense matrix products, by number format: fp64, fp32, tf32, bf16, fp16."""
    within_host: Annotated[Link, cosmetic]
    """The link between two devices of a host."""
    between_hosts: Annotated[Link, cosmetic]
    """The link between two devices on different hosts."""
    reached: Annotated[Band, cosmetic] = field(default_factory=lambda: Band(low=0.3, high=0.75))
    """Shares of the rates above that a training reaches: the band of the plan's times."""
    operation_us: Annotated[float, at_least(0), cosmetic, unit("microseconds")] = 5.0
    """Microseconds that the host needs to start an operation on the device."""
    input_mb_s: Annotated[float | None, above(0), cosmetic, unit("10^6 bytes/s")] = None
    """10^6 bytes a second that one process of the loader reads and collates; null: unknown."""
    price_usd_h: Annotated[float | None, at_least(0), cosmetic, unit("US dollars an hour")] = None
    """US dollars for an hour of one device; null: unknown."""
    whole_host: Annotated[bool, cosmetic] = False
    """Whether memory and rates are those of a host, whose tasks share them, as on the CPU; false: of each device."""
    source: Annotated[Mapping[str, str], cosmetic] = field(default_factory=dict)
    """Sources of the figures: key -> name of the document."""
    date: Annotated[Mapping[str, str], cosmetic] = field(default_factory=dict)
    """Dates when the documents were published or read: key -> date."""

    def __post_init__(self) -> None:
        problems = [
            Problem(key=f"tflops.{name}", rule=f"no such number format. Use one of {', '.join(FORMATS)}.")
            for name in self.tflops
            if name not in FORMATS
        ]
        known = {figure.name for figure in fields(self)} - {"source", "date"}
        for table in ("source", "date"):
            problems += [
                Problem(key=f"{table}.{name}", rule="names no figure. Use a key of hardware.")
                for name in getattr(self, table)
                if name not in known
            ]
        if not self.tflops:
            problems.append(Problem(key="tflops", rule="names no number format. Give at least fp32."))
        refuse(problems)

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory of a device."""
        return int(self.memory_gib * 2**30)

    def workspace_bytes(self, *, reproducible: bool) -> int:
        """Return the bytes of the workspaces of cuBLAS; 0 if they are unknown.

        Args:
            reproducible: whether `numerics.reproducible` chooses their size, which is then the same on every GPU.
        """
        if not self.workspace_mib:
            return 0
        return _REPRODUCIBLE_BYTES if reproducible else int(self.workspace_mib * 2**20)

    def peak_flops(self, precision: str) -> float | None:
        """Return operations a second of matrix products in a precision; None if they are not known.

        A device without tf32, bf16 or fp16 computes them at its rate of fp32.
        """
        kind: str | None = _COMPUTED_IN.get(precision, precision)
        while kind is not None and kind not in self.tflops:
            kind = _INSTEAD[kind]
        return None if kind is None else self.tflops[kind] * 1e12

    def here(self, say: Say | None = None) -> Hardware:
        """Return this object."""
        del say
        return self

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of the plan about these figures."""
        parts = [f"{text} ({self.date[key]})" if key in self.date else text for key, text in self.source.items()]
        return (f"hardware: {self.name}; {'; '.join(dict.fromkeys(parts))}",) if parts else ()


def hardware_of(cfg: RunConfig, say: Say | None = None) -> Hardware | None:
    """Return the hardware that a run is planned for; None if the config names none.

    With `say`, the figures of this machine are measured where they are needed for the first time.
    """
    if not cfg.hardware:
        return None
    choice: HardwareChoice = build(cfg.hardware, "hardware")
    return choice.here(say)


def hardware_under(device: torch.device) -> Hardware | None:
    """Return the figures of a rank's GPU; None on other devices, and for a GPU without figures."""
    return recognised(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def recognised(driver_name: str) -> Hardware | None:
    """Return trainkit's own figures of the GPU with a driver name; None if there are none.

    The name must be equal: an H100 for PCIe and a part of a GPU (MIG) have other rates.

    Example:
        >>> [gpu and gpu.name for gpu in map(recognised, ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe"))]
        ['NVIDIA H100 SXM', None]
    """
    for path in sorted((shipped_conf() / "hardware").glob("*.yaml")):
        node = read_document(path).values
        if driver_name in node.get("driver_names", ()):
            hardware: Hardware = build(node, "hardware")
            return hardware
    return None
