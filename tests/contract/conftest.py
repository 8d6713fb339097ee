"""What several contracts share."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def store() -> Iterator[tuple[str, int]]:
    """A rendezvous store of this process."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    tcp_store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    yield "127.0.0.1", port
    del tcp_store
