"""Names of devices: torch's spelling, `cuda:1`, and TensorFlow's, `/gpu:1`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trainkit.errors import Problem

_PATTERN = re.compile(r"^/?(?:device:)?(?P<kind>cpu|gpu|cuda)(?::(?P<index>\d+))?$", re.IGNORECASE)


def parse_device(name: str | int) -> str | None:
    """Return a device in torch's spelling; None if the name is not a device.

    Example:
        >>> parse_device("/gpu:1"), parse_device(0), parse_device("cpu"), parse_device("gpu:x")
        ('cuda:1', 'cuda:0', 'cpu', None)
    """
    if isinstance(name, int):
        return f"cuda:{name}"
    match = _PATTERN.match(name)
    if match is None:
        return None
    if match["kind"].lower() == "cpu":
        return "cpu"
    return f"cuda:{match['index'] or 0}"


def device_list_problems(key: str, names: Sequence[str | int] | None, num_gpus: int, *, because: str) -> list[Problem]:
    """Return the problems of a list of devices: invalid names, repeated GPUs, an empty list."""
    if names is None:
        return []
    if not names:
        return [Problem(key=key, value=[], rule="names no device. Leave it out for all.")]
    problems = [problem for name in names for problem in device_problems(key, name, num_gpus)]
    parsed = [parse_device(name) for name in names]
    twice = sorted({name for name in parsed if name is not None and name != "cpu" and parsed.count(name) > 1})
    if twice:
        problems.append(Problem(key=key, value=list(names), rule=f"names {', '.join(twice)} twice. {because}"))
    return problems


def device_problems(key: str, name: str | int, num_gpus: int) -> list[Problem]:
    """Return the problems of the name of a device on a host of `num_gpus` GPUs."""
    device = parse_device(name)
    if device is None:
        return [Problem(key=key, value=name, rule="not the name of a device. Use cpu, cuda:0 or /gpu:0.")]
    index = int(device.partition(":")[2] or 0)
    if device != "cpu" and index >= num_gpus:
        have = f"{num_gpus}, counted from 0" if num_gpus else "none"
        return [Problem(key=key, value=name, rule=f"no such GPU: this host has {have}.")]
    return []
