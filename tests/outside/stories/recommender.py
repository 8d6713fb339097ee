"""A recommender: users and items are embeddings, of which a batch touches a few; their product predicts a rating."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

RECIPE = """
defaults: [override /model: null, override /data: null, override /optimizer: sgd,
  override /objective: regression, _self_]
model: {_target_: stories.recommender.Factors, users: 10, items: 14}
data: {_target_: stories.recommender.Ratings, users: 10, items: 14}
objective: {input: [user, item], target: stars}
"""


class Ratings(Dataset[dict[str, Tensor]]):
    def __init__(self, split: str, users: int, items: int) -> None:
        self.users, self.items = torch.randint(users, (40,)), torch.randint(items, (40,))
        self.stars = ((self.users + self.items) % 5).float()

    def __len__(self) -> int:
        return len(self.stars)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"user": self.users[index], "item": self.items[index], "stars": self.stars[index]}


class Factors(nn.Module):
    def __init__(self, users: int, items: int, width: int = 4) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        stars: Tensor = (self.users(users) * self.items(items)).sum(dim=1) + self.bias
        return stars
