"""The other side of `pool.py`: `python -m tests.support.pool_worker SOCKET`."""

from __future__ import annotations

import gc
import importlib
import pickle
import random
import sys
import traceback
from contextlib import suppress
from datetime import timedelta
from functools import _lru_cache_wrapper
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.tensor import _redistribute

from tests.support import quick
from tests.support.pool import Member, Request
from trainkit.config.targets.allowed import allow_packages


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
    gc.unfreeze()  # a fork has frozen what it began with
    wrappers = [instance for instance in gc.get_objects() if type(instance) is _lru_cache_wrapper]
    caches = [wrapper for wrapper in wrappers if wrapper.__module__.startswith("torch.distributed.tensor")]
    gc.freeze()  # a collection after each request is quick
    while True:
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
        # What torch has placed on a mesh stays in its caches, and with it the mesh and its process groups, each with a
        # thread that wakes a hundred times a second: 130 idle ones take a sixth of a core. Cycles keep them as well.
        for cached in caches:
            cached.cache_clear()
        with suppress(AttributeError):  # an older torch has fewer caches
            torch._C._clear_DTensor_sharding_propagator_cache()
            _redistribute.clear_redistribute_planner_cache()
        gc.collect()


def _call(request: Request) -> Any:
    module, _, name = request.function.rpartition(".")
    function = getattr(importlib.import_module(module), name)
    if not request.group:
        return function(request.member, *request.args)
    _join(request.member)
    try:
        return function(request.member, *request.args)
    finally:
        dist.destroy_process_group()


def _join(member: Member) -> None:
    store = PrefixStore(member.prefix, TCPStore(*member.store, is_master=False))
    dist.init_process_group(
        "gloo", store=store, rank=member.rank, world_size=member.num_ranks, timeout=timedelta(seconds=240)
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
