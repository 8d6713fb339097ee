"""Servers of a parameter server on threads of this process, for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from threading import Event, Thread

import torch
from torch import nn

from trainkit.errors import LinkError
from trainkit.strategies.core.optimizer import OptimizerStepper
from trainkit.strategies.updates.links import AuthenticatedListener, Connection, connect
from trainkit.strategies.updates.server import MakeStepper, ParameterServerClient, VariableServer
from trainkit.strategies.updates.variables import VariableShards, unsaved_of, variables_of

TOKEN = b"a token of 32 bytes, as a run has"


MakeOptimizer = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]


def stepping(make_optimizer: MakeOptimizer) -> MakeStepper:
    """What steps one optimizer."""
    return lambda masters: OptimizerStepper(make_optimizer(masters), list(masters.values()))


@dataclass(frozen=True)
class Farm:
    """Servers that run, and the chief's connections to them."""

    shares: VariableShards
    addresses: list[tuple[str, int]]
    chief: ParameterServerClient

    def client(self, name: str = "worker:0", **settings: object) -> ParameterServerClient:
        """Connections of a worker; the caller closes them."""
        return ParameterServerClient(links_to(self.addresses, name), self.shares, **settings)  # type: ignore[arg-type]


def links_to(addresses: Sequence[tuple[str, int]], name: str) -> list[Connection]:
    """Connections of a task to all servers."""
    named = {f"ps:{index}": address for index, address in enumerate(addresses)}
    return [connect(where, token=TOKEN, name=name, peer=peer, timeout_s=60) for peer, where in named.items()]


@contextmanager
def serving(
    model: nn.Module, make_optimizer: MakeOptimizer, *, servers: int = 1, loads: bool = True, timeout_s: float = 10
) -> Iterator[Farm]:
    """So many servers, holding the numbers of a model."""
    shares = VariableShards(variables_of(model, torch.float32), servers)
    with ExitStack() as stack:
        over = Event()
        listeners = [AuthenticatedListener(f"ps:{index}", token=TOKEN, timeout_s=5) for index in range(servers)]
        for index, listener in enumerate(listeners):
            server = VariableServer(shares, index, stepping(make_optimizer), timeout_s=timeout_s)
            thread = Thread(target=_run, args=(server, listener, over.is_set))
            thread.start()
            stack.callback(thread.join)
        stack.callback(over.set)
        addresses = [listener.address for listener in listeners]
        chief = ParameterServerClient(links_to(addresses, "chief"), shares)
        stack.callback(chief.close)
        farm = Farm(shares, addresses, chief)
        if loads:
            chief.load_state({**state_of(model), **unsaved_of(model)}, version=0)
        yield farm
        chief.shutdown()


def _run(server: VariableServer, listener: AuthenticatedListener, stopped: Callable[[], bool]) -> None:
    with suppress(LinkError):  # the test ended early, and says why itself
        server.serve(listener, stopped)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """A model's numbers, as a checkpoint names them."""
    saved = model.state_dict()
    params = {f"param/{name}": param.detach().clone() for name, param in model.named_parameters()}
    return params | {f"buffer/{name}": buffer.clone() for name, buffer in model.named_buffers() if name in saved}
