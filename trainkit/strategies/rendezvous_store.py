"""The client of a rendezvous store, made within a time limit.

The constructor of TCPStore waits for ever where a process accepts its connection and never answers; its timeout bounds
the connecting alone.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from trainkit.errors import LinkError
from trainkit.time_limits import call_within

_START_S = 60.0
"""The supervisor listens before it has imported torch, and answers afterwards: on a loaded machine this late."""


def store_client(address: tuple[str, int], timeout_s: float) -> Any:
    """Connect to a store that must answer in `timeout_s`, which is also how long the client waits for a key.

    Raises:
        LinkError: a process listens there and does not answer.
    """
    host, port = address
    timeout, limit_s = timedelta(seconds=timeout_s), max(timeout_s, _START_S)
    try:
        return call_within(
            lambda: dist.TCPStore(host, port, is_master=False, timeout=timeout),  # type: ignore[attr-defined]
            limit_s,
        )
    except TimeoutError:
        what = f"the store at {host}:{port} accepts connections and does not answer"
        raise LinkError(f"{what}: {limit_s:g} s") from None
