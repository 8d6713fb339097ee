"""Fine-tuning: a pretrained body is loaded in the constructor and partly frozen; the head learns at another rate."""

import io

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

RECIPE = """
defaults: [override /model: null, override /data: null, override /optimizer: sgd,
  override /objective: classification, _self_]
model: {_target_: stories.fine_tuning.FineTuned, classes: 3}
data: {_target_: stories.fine_tuning.NewTask}
optimizer:
  groups:
    norms: {match: ['type:*Norm*', '*.bias'], weight_decay: 0.0}
    body: {match: ['body.*'], lr: 0.02}
"""


class NewTask(Dataset[dict[str, Tensor]]):
    def __init__(self, split: str) -> None:
        self.features = torch.randn(24, 5)

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"features": self.features[index], "label": self.features[index][:3].argmax()}


def body_of(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, width))


def pretrained(width: int) -> bytes:
    """The content of a file that another training wrote."""
    generator, file = torch.Generator().manual_seed(7), io.BytesIO()
    body = body_of(width).state_dict()
    torch.save({name: torch.randn(tensor.shape, generator=generator) / 3 for name, tensor in body.items()}, file)
    return file.getvalue()


FILE = pretrained(8)


class FineTuned(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = body_of(8)
        self.body.load_state_dict(torch.load(io.BytesIO(FILE), weights_only=True))
        self.body[0].requires_grad_(requires_grad=False)
        self.head = nn.Linear(8, classes)

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.relu(self.body(features)))
        return scores
