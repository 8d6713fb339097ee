"""Servers of a parameter server on threads of this process, for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

import torch
from torch import nn

from trainkit.errors import LinkError
from trainkit.strategies.parameter_server.server.main import serve
from trainkit.strategies.parameter_server.wire.auth import AuthenticatedListener
from trainkit.strategies.parameter_server.wire.client import ParameterServerClient
from trainkit.strategies.parameter_server.wire.variable_shards import VariableShards, unsaved_of, variables_of

TOKEN = b"a token of 32 bytes, as a run has"

MakeOptimizer = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Farm:
    """Servers that run, and the chief's connections to them."""

    shares: VariableShards
    addresses: list[tuple[str, int]]
    chief: ParameterServerClient

    def client(self, name: str = "worker:0", **settings: object) -> ParameterServerClient:
        """Connections of a worker; the caller closes them."""
        return ParameterServerClient.connect(
            self.addresses,
            self.shares,
            token=TOKEN,
            name=name,
            timeout_s=60,
            **settings,  # type: ignore[arg-type]
        )


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
            settings = {"make_optimizer": make_optimizer, "timeout_s": timeout_s, "stopped": over.is_set}
            thread = Thread(target=_run, args=(listener, shares, index, settings))
            thread.start()
            stack.callback(thread.join)
        stack.callback(over.set)
        addresses = [listener.address for listener in listeners]
        chief = ParameterServerClient.connect(
            addresses, shares, token=TOKEN, name="chief", timeout_s=60
        )  # the first optimizer is slow
        stack.callback(chief.close)
        farm = Farm(shares, addresses, chief)
        if loads:
            chief.load_state(state_of(model), version=0, unsaved=unsaved_of(model))
        yield farm
        chief.shutdown()


def _run(listener: AuthenticatedListener, shares: VariableShards, index: int, settings: Mapping[str, Any]) -> None:
    with suppress(LinkError):  # the test ended early, and says why itself
        serve(listener, shares, index, **settings)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """A model's numbers, as a checkpoint names them."""
    saved = model.state_dict()
    params = {f"param/{name}": param.detach().clone() for name, param in model.named_parameters()}
    return params | {f"buffer/{name}": buffer.clone() for name, buffer in model.named_buffers() if name in saved}
