"""A language model with tied weights, recurrent, scored by a shipped objective; weight decay on matrices alone."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

RECIPE = """
defaults: [override /model: null, override /data: null, override /optimizer: adamw,
  override /objective: language_modelling, _self_]
model: {_target_: stories.tied_words.Writer, words: 9}
data: {_target_: stories.tied_words.Counting, words: 9}
optimizer: {lr: 0.01}
"""


class Counting(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, split: str, words: int) -> None:
        self.starts, self.words = torch.randint(words, (24,)), words

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = (self.starts[index] + torch.arange(8)) % self.words
        return row[:-1], row[1:]


class Writer(nn.Module):
    def __init__(self, words: int, width: int = 6) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.memory = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.memory(self.words(words))
        scores: Tensor = self.head(states)
        return scores
