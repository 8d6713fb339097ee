"""Read how much energy devices have consumed, from NVML, the library of NVIDIA's driver."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainkit.trainer.events import Run


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
        millijoules = sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle_of(pynvml, one)) for one in devices)
    except pynvml.NVMLError:
        return None
    return float(millijoules) / 1e3


def handle_of(pynvml: object, device: torch.device) -> object:
    """Return NVML's handle: by the UUID, because CUDA_VISIBLE_DEVICES renumbers the devices of this process."""
    uuid = torch.cuda.get_device_properties(device).uuid
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())  # type: ignore[attr-defined]


def devices_of(run: Run) -> list[torch.device]:
    """Return the CUDA devices that this process computes on."""
    found = {param.device for param in run.model.parameters()} | {run.device}
    return sorted((one for one in found if one.type == "cuda"), key=str)
