"""Measure the transfer of gradients and parameters: push + pull with a server, compared with other transports.

    python benchmarks/parameter_server.py [--rounds 15] [--no-ray]

Each transport has its own process at the other end, which stores the data it receives and returns what it holds; all
are started first and measured in turns, so that each round sees the same machine. A figure is the median over rounds.
Nothing is computed or updated meanwhile. The last table counts the bytes between a worker and each of several servers
in a step.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_raylet_start_wait_time_s"] = "180"  # noqa: SIM112 - the name that Ray reads
os.environ["GLOO_SOCKET_IFNAME"] = os.environ["TP_SOCKET_IFNAME"] = "lo"

import argparse
import importlib.util
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks import report
from tests.support.serving import serving, stepping
from trainkit.errors import LinkError
from trainkit.strategies.updates.links import AuthenticatedListener, connect
from trainkit.strategies.updates.server import ParameterServerClient, VariableServer
from trainkit.strategies.updates.variables import VariableShards, variables_of

SIZES_MB = (0.4, 10, 100)
TENSORS = 16
TOKEN = b"benchmark"
TIMEOUT = timedelta(seconds=60)

Move = Callable[[list[Tensor], list[Tensor]], object]
"""Send the first tensors, receive into the second."""


class Model(nn.Module):
    """A model with the given size in MB."""

    def __init__(self, size_mb: float) -> None:
        super().__init__()
        numel = int(size_mb * 1e6 / 4 / TENSORS)
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(numel)) for _ in range(TENSORS)])


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(named.values()), lr=0.1, fused=True)


@contextmanager
def running(target: Callable[..., None], *args: Any) -> Iterator[Any]:
    """Start a process at the other end; yield its first message."""
    context = mp.get_context("forkserver")
    parent_end, child_end = context.Pipe()
    process = context.Process(target=target, args=(child_end, *args), daemon=True)
    process.start()
    try:
        yield parent_end.recv()
    finally:
        process.terminate()
        process.join()


# trainkit


def serve_trainkit(pipe: Any, size_mb: float) -> None:
    torch.set_num_threads(1)
    listener = AuthenticatedListener("ps:0", token=TOKEN)
    pipe.send(listener.address)
    with suppress(LinkError):  # the end of the benchmark
        shares = VariableShards(variables_of(Model(size_mb), torch.float32), 1)
        VariableServer(shares, 0, stepping(sgd)).serve(listener)


@contextmanager
def trainkit(size_mb: float) -> Iterator[Move]:
    model = Model(size_mb)
    with running(serve_trainkit, size_mb) as address:
        shares = VariableShards(variables_of(model, torch.float32), 1)
        link = connect(address, token=TOKEN, name="chief", peer="ps:0", timeout_s=60)
        servers = ParameterServerClient([link], shares)
        servers.load_state({f"param/{name}": param.detach() for name, param in model.named_parameters()}, version=0)

        def move(grads: list[Tensor], into: list[Tensor]) -> None:
            servers.push("a", grads)
            servers.pull(into)

        try:
            yield move
        finally:
            servers.close()


# a bare socket


def serve_socket(pipe: Any, num_bytes: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname())
        connection, _ = server.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    memory = memoryview(bytearray(num_bytes))
    while receive(connection, memory):
        connection.sendall(memory)


def receive(connection: socket.socket, memory: memoryview) -> bool:
    rest = memory
    while rest:
        count = connection.recv_into(rest)
        if not count:
            return False
        rest = rest[count:]
    return True


@contextmanager
def bare_socket(size_mb: float) -> Iterator[Move]:
    num_bytes = int(size_mb * 1e6 / 4 / TENSORS) * 4 * TENSORS
    sent, back = memoryview(bytearray(num_bytes)), memoryview(bytearray(num_bytes))
    with running(serve_socket, num_bytes) as address, socket.create_connection(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def move(grads: list[Tensor], into: list[Tensor]) -> None:
            connection.sendall(sent)
            receive(connection, back)

        yield move


# Memory shared by two processes, without the second process: a copy there and a copy back, the lower bound.


@contextmanager
def two_copies(size_mb: float) -> Iterator[Move]:
    model = Model(size_mb).share_memory()
    shared = [param.detach() for param in model.parts]

    def move(grads: list[Tensor], into: list[Tensor]) -> None:
        torch._foreach_copy_(shared, grads)
        torch._foreach_copy_(into, shared)

    yield move


# two ranks of gloo


def gloo_group(store: TCPStore, rank: int) -> Any:
    return dist.ProcessGroupGloo(store, rank, 2, TIMEOUT)


def serve_gloo(pipe: Any, num_bytes: int) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    pipe.send(store.port)
    group, flat = gloo_group(store, 1), torch.ones(num_bytes // 4)
    while True:
        group.recv([flat], 0, 0).wait()
        group.send([flat], 0, 0).wait()


@contextmanager
def gloo_pair(size_mb: float) -> Iterator[Move]:
    num_bytes = int(size_mb * 1e6 / 4 / TENSORS) * 4 * TENSORS
    sent, back = torch.ones(num_bytes // 4), torch.ones(num_bytes // 4)
    with running(serve_gloo, num_bytes) as port:
        group = gloo_group(TCPStore("127.0.0.1", port, 2, timeout=TIMEOUT), 0)

        def move(grads: list[Tensor], into: list[Tensor]) -> None:
            group.send([sent], 1, 0).wait()
            group.recv([back], 1, 0).wait()

        yield move


# torch RPC (tensorpipe): one agent a process, so one server for all sizes

HELD: dict[str, list[Tensor]] = {}


def rpc_push(name: str, tensors: list[Tensor]) -> None:
    HELD[name] = tensors


def rpc_pull(name: str) -> list[Tensor]:
    return HELD[name]


def rpc_options(port: int) -> Any:
    from torch.distributed import rpc

    return rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=60)


def serve_rpc(pipe: Any, port: int) -> None:
    from torch.distributed import rpc

    torch.set_num_threads(1)
    pipe.send(None)
    rpc.init_rpc("server", rank=1, world_size=2, rpc_backend_options=rpc_options(port))  # type: ignore[no-untyped-call]
    rpc.shutdown()


@contextmanager
def rpc_agent() -> Iterator[Callable[[float], Any]]:
    from torch.distributed import rpc

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with running(serve_rpc, port):
        rpc.init_rpc("client", rank=0, world_size=2, rpc_backend_options=rpc_options(port))  # type: ignore[no-untyped-call]

        @contextmanager
        def torch_rpc(size_mb: float) -> Iterator[Move]:
            def move(grads: list[Tensor], into: list[Tensor]) -> None:
                rpc.rpc_sync("server", rpc_push, args=(str(size_mb), grads))
                for tensor, value in zip(into, rpc.rpc_sync("server", rpc_pull, args=(str(size_mb),)), strict=True):
                    tensor.copy_(value)

            yield move

        try:
            yield torch_rpc
        finally:
            rpc.shutdown(graceful=True)


# Ray actors


@contextmanager
def ray_actor(size_mb: float) -> Iterator[Move]:
    import ray

    class Holder:
        def push(self, arrays: list[Any]) -> None:
            self.arrays = arrays

        def pull(self) -> list[Any]:
            return self.arrays

    actor = ray.remote(Holder).remote()

    def move(grads: list[Tensor], into: list[Tensor]) -> None:
        ray.get(actor.push.remote([grad.numpy() for grad in grads]))
        for tensor, value in zip(into, ray.get(actor.pull.remote()), strict=True):
            tensor.numpy()[:] = value

    yield move


@contextmanager
def ray_runtime() -> Iterator[None]:
    import ray

    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False, _node_ip_address="127.0.0.1"
    )
    try:
        yield
    finally:
        ray.shutdown()


def measure(size_mb: float, ways: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round for each transport, measured in turns."""
    grads = [param.detach() for param in Model(size_mb).parts]
    into = [torch.zeros_like(grad) for grad in grads]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with ExitStack() as stack:
        moves = {name: stack.enter_context(way(size_mb)) for name, way in ways.items()}
        for number in range(rounds + 2):
            for name, move in moves.items():
                start = time.perf_counter()
                move(grads, into)
                if number >= 2:
                    seconds[name].append(time.perf_counter() - start)
        assert all(torch.equal(grad, other) for grad, other in zip(grads, into, strict=True))
    return seconds


def times_table(by_size: dict[float, dict[str, list[float]]]) -> str:
    """Return a table with a row per transport: ms and the ratio to trainkit, by size."""
    rows = []
    for name in next(iter(by_size.values())):
        cells = [name]
        for size, seconds in by_size.items():
            median = statistics.median(seconds[name])
            base = statistics.median(seconds["trainkit"])
            cells.append(f"{1e3 * median:.2f} ms, {2 * size / 1e3 / median:.2f} GB/s, **{median / base:.2f}**")
        rows.append(cells)
    return report.table(["push + pull", *(f"{size:g} MB" for size in by_size)], rows)


def shares_table(size_mb: float, steps: int) -> str:
    """Return a table of the bytes that servers hold and transfer."""
    rows = []
    for count in (1, 2, 4):
        model = Model(size_mb)
        into, fair = [param.detach() for param in model.parts], 1e6 * size_mb / count
        with serving(model, sgd, servers=count) as farm:
            servers = farm.chief
            servers.pull(into)
            before = [link.sent_bytes + link.received_bytes for link in servers.links]
            for step in range(steps):
                servers.push("a", into)
                servers.apply(version=step + 1, lr_factor=1.0, keys=["a"])
                servers.pull(into)
            after = [link.sent_bytes + link.received_bytes for link in servers.links]
        carried = max(late - early for early, late in zip(before, after, strict=True)) / steps
        sizes = [farm.shares.bytes_of(server) for server in range(count)]
        spread = f"{min(sizes) / fair:.3f} to {max(sizes) / fair:.3f}"
        rows.append([str(count), f"{max(sizes):,}", spread, f"{carried:,.0f}", f"{carried / (2e6 * size_mb):.4f}"])
    head = ["servers", "bytes of the fullest", "of an equal share", "bytes a step to and from it", "of all"]
    return report.table(head, rows)


def main() -> None:
    """Measure, print and write the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-ray", action="store_true", help="leave Ray out; it is left out where it is not installed")
    parser.add_argument("--quick", action="store_true", help="two rounds of the small sizes; writes nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    mp.get_context("forkserver").set_forkserver_preload(
        ["torch._dynamo", "torch.distributed.rpc", VariableServer.__module__]
    )
    rounds, sizes = (2, SIZES_MB[:2]) if options.quick else (options.rounds, SIZES_MB)
    with ExitStack() as stack:
        ways: dict[str, Any] = {"trainkit": trainkit, "a bare socket": bare_socket, "a pair of gloo ranks": gloo_pair}
        ways["two copies of memory"] = two_copies
        ways["torch RPC (tensorpipe)"] = stack.enter_context(rpc_agent())
        if not options.no_ray and importlib.util.find_spec("ray"):
            stack.enter_context(ray_runtime())
            ways["a Ray actor"] = ray_actor
        by_size = {}
        for size in sizes:
            by_size[size] = measure(size, ways, rounds)
            print(times_table({size: by_size[size]}), file=sys.stderr, flush=True)
    text = (
        "Both ways, with one server. Bold: the time over that of trainkit, so that above 1 trainkit is faster. "
        "Two copies of memory are what sharing it with the server would cost at least: a copy there, a copy back, "
        "and nobody at the other end. Targets: torch RPC at least 3, a bare socket at least 0.5."
    )
    body = "\n\n".join(
        [
            text,
            times_table(by_size),
            "## Several servers\n\n10 MB of parameters in 16 tensors; a step pushes and pulls all of it.",
            shares_table(10, steps=5),
        ]
    )
    if options.quick:
        print(body)
        return
    command = f"python benchmarks/parameter_server.py --rounds {options.rounds}"
    report.write("parameter_server", "Moving gradients and parameters", command, body)


if __name__ == "__main__":
    main()
