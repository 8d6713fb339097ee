"""Use, memory, power, temperature and energy of GPUs, from NVML, the library of NVIDIA's driver."""

from __future__ import annotations

import importlib.util
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch

from trainkit.errors import MissingExtraError
from trainkit.fields import above, cosmetic, unit
from trainkit.trainer.events import Callback, Run


def consumed_joules(devices: Sequence[torch.device]) -> float | None:
    """Return the energy that CUDA devices have consumed since their driver was loaded.

    Args:
        devices: CUDA devices of this process.

    Returns:
        Joules of all of them together; None if there is no device, the package `nvidia-ml-py` (module `pynvml`), is
        missing, or a device does not report its energy (before NVIDIA's Volta).

    Source: NVML API reference, nvmlDeviceGetTotalEnergyConsumption (millijoules).

    Example:
        >>> consumed_joules([]) is None
        True
    """
    if not devices:
        return None
    try:
        import pynvml  # noqa: PLC0415 - optional
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        millijoules = sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle_of(pynvml, device)) for device in devices)
    except pynvml.NVMLError:
        return None
    return float(millijoules) / 1e3


def handle_of(pynvml: object, device: torch.device) -> object:
    """Return NVML's handle: by the UUID, because CUDA_VISIBLE_DEVICES renumbers the devices of this process."""
    uuid = torch.cuda.get_device_properties(device).uuid
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())  # type: ignore[attr-defined]


def devices_of(run: Run) -> list[torch.device]:
    """Return the CUDA devices that this process computes on."""
    devices = {param.device for param in run.model.parameters()} | {run.device}
    return sorted((device for device in devices if device.type == "cuda"), key=str)


_log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class Gpu(Callback):
    """Adds figures of the GPUs of rank 0 to the rows of metrics: `gpu/0/use`, `memory`, `power`, `temperature`.

    The driver is queried when a row is logged, at most every `every_s` seconds, and no step waits for the device. A
    figure that a GPU does not report is left out.

    Raises:
        MissingExtraError: the package nvidia-ml-py is not installed.

    Source: NVML API reference, device queries.
    """

    observes: ClassVar[bool] = True

    every_s: Annotated[float, cosmetic, above(0), unit("seconds")] = 1.0
    """Least seconds between two queries of the driver; rows in between have no GPU figures."""
    _nvml: Any = field(default=None, init=False, repr=False)
    _handles: Sequence[Any] = field(default=(), init=False, repr=False)
    _due: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        if sys.modules.get("pynvml") is None and importlib.util.find_spec("pynvml") is None:
            raise MissingExtraError(key="callbacks.gpu", package="nvidia-ml-py", extra="gpu")

    def run_start(self, run: Run) -> None:
        """Find the GPUs; warn if there are none."""
        if not run.is_owner:
            return
        import pynvml  # noqa: PLC0415 - optional

        try:
            pynvml.nvmlInit()
            self._handles = [handle_of(pynvml, device) for device in devices_of(run)]
        except pynvml.NVMLError as error:
            _log.warning("callbacks=[gpu] records nothing: NVIDIA's driver answers: %s", error)
            return
        self._nvml = pynvml
        if not self._handles:
            _log.warning("callbacks=[gpu] records nothing: rank 0 trains on %s.", run.device)

    def row_figures(self, run: Run) -> Mapping[str, float]:
        """Return the figures of this moment, if they are due."""
        now = time.monotonic()
        if not self._handles or now < self._due:
            return {}
        self._due = now + self.every_s
        nvml = self._nvml
        return {
            f"gpu/{number}/{name}": value
            for number, handle in enumerate(self._handles)
            for name, value in _figures(nvml, handle)
        }


def _figures(nvml: Any, handle: Any) -> Iterator[tuple[str, float]]:
    """Yield the figures that one GPU reports: share of time with a kernel, bytes, watts, degrees Celsius."""
    questions: dict[str, Callable[[], float]] = {
        "use": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        "memory": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
        "power": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temperature": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
    }
    for name, ask in questions.items():
        try:
            yield name, float(ask())
        except nvml.NVMLError:  # this GPU does not report it
            continue
