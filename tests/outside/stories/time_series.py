"""A time series: a recurrent net forecasts the next values, in windows of one long series."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

RECIPE = """
defaults: [override /model: null, override /data: null, override /optimizer: sgd,
  override /objective: regression, _self_]
model: {_target_: stories.time_series.Forecaster, horizon: 3}
data: {_target_: stories.time_series.Windows, past: 10, horizon: 3}
objective: {error: huber}
"""


class Windows(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, split: str, past: int, horizon: int) -> None:
        time = torch.arange(40.0) + (0 if split == "train" else 40)
        self.series = torch.sin(time / 3) + 0.1 * torch.randn(40)
        self.past, self.horizon = past, horizon

    def __len__(self) -> int:
        return len(self.series) - self.past - self.horizon + 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        now = index + self.past
        return self.series[index:now, None], self.series[now : now + self.horizon]


class Forecaster(nn.Module):
    def __init__(self, horizon: int, width: int = 8) -> None:
        super().__init__()
        self.memory = nn.GRU(1, width, batch_first=True)
        self.head = nn.Linear(width, horizon)

    def forward(self, past: Tensor) -> Tensor:
        states, _ = self.memory(past)
        values: Tensor = self.head(states[:, -1])
        return values
