"""A model whose training depends on what no checkpoint has."""

from torch import Tensor

from trainkit.models.mlp import Mlp


class Forgetful(Mlp):
    """A model that scales its outputs by how often this object was called."""

    calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(inputs) * (1 + self.calls)
