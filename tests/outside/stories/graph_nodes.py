"""Graphs: nodes get the messages of their neighbours; graphs are padded to one size, and only real nodes count."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from trainkit.objectives.base import Loss, Model, Objective

RECIPE = """
defaults: [override /model: null, override /data: null, override /optimizer: sgd, override /objective: null, _self_]
model: {_target_: stories.graph_nodes.MessagePassing}
data: {_target_: stories.graph_nodes.Rings, nodes: 6}
objective: {_target_: stories.graph_nodes.NodeClasses}
"""


class Rings(Dataset[dict[str, Tensor]]):
    def __init__(self, split: str, nodes: int) -> None:
        self.nodes, self.sizes = nodes, torch.randint(3, nodes + 1, (24,)).tolist()
        self.features = torch.randn(24, nodes, 3)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        size = self.sizes[index]
        edges = torch.zeros(self.nodes, self.nodes)
        edges[:size, :size] = (torch.eye(size).roll(1, 0) + torch.eye(size).roll(-1, 0)) / 2
        real = torch.arange(self.nodes) < size
        features = self.features[index] * real[:, None]
        kinds = ((edges @ features).sum(1) > 0).long()
        return {"features": features, "edges": edges, "real": real, "kinds": kinds}


class MessagePassing(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.rounds = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 2)

    def forward(self, features: Tensor, edges: Tensor) -> Tensor:
        hidden = self.first(features)
        for layer in self.rounds:
            hidden = hidden + torch.relu(layer(edges @ hidden))
        scores: Tensor = self.head(hidden)
        return scores


class NodeClasses(Objective):
    def weight_per_sample(self, sample: object) -> None:
        """Graphs have different numbers of nodes."""

    def loss(self, model: Model, batch: dict[str, Tensor]) -> Loss:
        scores, real = model(batch["features"], batch["edges"]), batch["real"]
        loss_sum = functional.cross_entropy(scores[real], batch["kinds"][real], reduction="sum")
        return Loss(loss_sum=loss_sum, weight=real.sum(), outputs=scores[real], targets=batch["kinds"][real])
