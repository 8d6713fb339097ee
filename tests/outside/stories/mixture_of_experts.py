"""A mixture of experts: a gate weighs small nets, and a penalty keeps their loads alike."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from trainkit import Loss, Supervised

RECIPE = """
defaults: [override /model: null, override /data: null, override /optimizer: sgd, override /objective: null, _self_]
model: {_target_: stories.mixture_of_experts.Experts, experts: 3}
data: {_target_: stories.mixture_of_experts.Pieces}
objective: {_target_: stories.mixture_of_experts.BalancedError, balance: 0.1}
"""


class Pieces(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, split: str) -> None:
        self.places = 4 * torch.rand(24, 1) - 2

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        position = self.places[index]
        return position, position.abs()


class Experts(nn.Module):
    def __init__(self, experts: int, width: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(1, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1)) for _ in range(experts)
        )

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        gates = self.gate(positions).softmax(dim=1)
        values = torch.cat([expert(positions) for expert in self.experts], dim=1)
        return (gates * values).sum(dim=1, keepdim=True), gates


class BalancedError(Supervised):
    couples_samples = True  # the penalty looks at the loads over the shard

    def __init__(self, balance: float) -> None:
        self.balance = balance

    def score(self, outputs: tuple[Tensor, Tensor], targets: Tensor) -> Loss:
        values, gates = outputs
        loss_sum = functional.mse_loss(values, targets, reduction="sum")
        penalty = self.balance * gates.mean(0).square().sum() * gates.shape[1]
        return Loss(loss_sum=loss_sum, weight=float(len(targets)), extra=penalty, outputs=values, targets=targets)
