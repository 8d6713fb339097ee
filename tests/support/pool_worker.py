"""The other side of `pool.py`: `python -m tests.support.pool_worker SOCKET`."""

from __future__ import annotations

import gc
import importlib
import pickle
import random
import sys
import traceback
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from tests.support import quick
from tests.support.pool import Place, Request
from trainkit.config.targets.allowed import allow_packages

_COLLECT_EVERY: Final = 8
"""Requests between two collections. A model in a cycle of references keeps its process groups, and each of those keeps
threads that wake a hundred times a second: left to themselves, a worker had 140 of them at the end of a session."""


def main(descriptor: int) -> None:
    """Answer requests until the session closes the socket."""
    torch.set_num_threads(1)
    random.seed()  # forks of one process begin with one state of each generator
    np.random.seed()  # noqa: NPY002 - the state that a user's code may draw from
    connection = Connection(descriptor)
    quick.quicken_launches(quick.scripts_of_the_session)
    with allow_packages(["tests"]):
        _serve(connection)


def _serve(connection: Connection) -> None:
    for number in count(1):
        try:
            request: Request = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            answer: tuple[Any, str | None] = (_call(request), None)
        except BaseException:  # noqa: BLE001 - whatever it is, the test that asked must see it
            answer = (None, traceback.format_exc())
        # not `send`: it would share the memory of tensors through a server of this process
        connection.send_bytes(pickle.dumps(answer))
        if number % _COLLECT_EVERY == 0:
            gc.collect()


def _call(request: Request) -> Any:
    module, _, name = request.function.rpartition(".")
    function = getattr(importlib.import_module(module), name)
    if not request.group:
        return function(request.place, *request.args)
    _join(request.place)
    try:
        return function(request.place, *request.args)
    finally:
        dist.destroy_process_group()


def _join(place: Place) -> None:
    store = PrefixStore(place.prefix, TCPStore(*place.store, is_master=False))
    dist.init_process_group(
        "gloo", store=store, rank=place.rank, world_size=place.num_ranks, timeout=timedelta(seconds=240)
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
