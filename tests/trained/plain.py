"""A model that needs torch alone, and a program that loads an exported file without trainkit."""

import sys

import torch
from safetensors.torch import load_file
from torch import Tensor, nn


class Plain(nn.Sequential):
    """Three layers, and batch statistics."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


class Unnormed(nn.Sequential):
    """The same without batch statistics."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


class Renamed(Plain):
    """A model whose `state_dict` has names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(_rename)  # type: ignore[no-untyped-call]


def _rename(module: nn.Module, state: dict[str, Tensor], prefix: str, _: object) -> None:
    for name in [*state]:
        state[f"own.{name}"] = state.pop(name) + 0


class Remembering(Plain):
    """A model with extra state."""

    def get_extra_state(self) -> Tensor:
        return torch.zeros(1)

    def set_extra_state(self, state: object) -> None:
        pass


if __name__ == "__main__":
    name, weights, inputs, outputs = sys.argv[1:]
    torch.set_num_threads(1)
    model: nn.Module = {"Plain": Plain, "Unnormed": Unnormed}[name]().double()
    model.load_state_dict(load_file(weights), strict=True)
    with torch.no_grad():
        torch.save(model.eval()(torch.load(inputs)), outputs)
    assert not any(name.partition(".")[0] == "trainkit" for name in sys.modules)
