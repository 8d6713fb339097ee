"""MIG instances: parts of a GPU that a process sees as a device of its own.

CUDA shows a process the first instance of CUDA_VISIBLE_DEVICES alone, so that each rank is given a variable of its own.
Source: NVIDIA Multi-Instance GPU User Guide, section "CUDA device enumeration".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
"""The environment variable that names the devices of a process."""


def mig_instances(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the MIG instances that CUDA_VISIBLE_DEVICES names; none where it names GPUs, or is not set.

    Example:
        >>> mig_instances({"CUDA_VISIBLE_DEVICES": "MIG-4e5f,MIG-77aa"})
        ('MIG-4e5f', 'MIG-77aa')
        >>> mig_instances({"CUDA_VISIBLE_DEVICES": "0,1"})
        ()
    """
    names = tuple(name.strip() for name in environ.get(VISIBLE, "").split(","))
    return tuple(dict.fromkeys(names)) if all(name.startswith("MIG-") for name in names) else ()


def count_devices(seen: int, environ: Mapping[str, str]) -> int:
    """Return the devices for the processes of this host together, where CUDA shows one process `seen` of them.

    Example:
        >>> environ = {"CUDA_VISIBLE_DEVICES": "MIG-4e5f,MIG-77aa"}
        >>> count_devices(1, environ), count_devices(0, environ), count_devices(4, {})
        (2, 0, 4)
    """
    return max(seen, len(mig_instances(environ))) if seen else 0


def rank_environ(device: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that give a rank its own one of several MIG instances; else none.

    Example:
        >>> rank_environ("cuda:1", {"CUDA_VISIBLE_DEVICES": "MIG-4e5f,MIG-77aa"})
        {'CUDA_VISIBLE_DEVICES': 'MIG-77aa', 'TRAINKIT_DEVICE': 'cuda:0'}
        >>> rank_environ("cuda:1", {"CUDA_VISIBLE_DEVICES": "0,1"})
        {}
    """
    names, (kind, _, index) = mig_instances(environ), device.partition(":")
    place = int(index or 0)
    if kind != "cuda" or len(names) < 2 or place >= len(names):
        return {}
    return {VISIBLE: names[place], "TRAINKIT_DEVICE": "cuda:0"}
