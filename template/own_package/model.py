"""The model: any torch module. The arguments of its constructor are its keys in the config."""

from torch import Tensor, nn


class SpiralNet(nn.Module):
    """Score points of the plane: a positive score means the second spiral."""

    def __init__(self, width: int = 64, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, 1),
        )

    def forward(self, points: Tensor) -> Tensor:
        """Return a score for each point: (n, 2) -> (n,)."""
        scores: Tensor = self.layers(points).squeeze(-1)
        return scores
