"""A model whose training depends on what no checkpoint has, and one of which a part of a parameter has no gradient."""

from torch import Tensor, nn

from trainkit.models.mlp import Mlp


class Forgetful(Mlp):
    """A model that scales its outputs by how often this object was called."""

    calls = 0
    each = 1.0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(inputs) * (1 + self.each * self.calls)


class Slightly(Forgetful):
    """The same, by less than rounding."""

    each = 1e-14


class Attending(nn.Module):
    """A transformer over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layer(images.reshape(-1, 8, 8)).flatten(1))
        return scores
