"""A language model with tied weights, recurrent, scored by a shipped objective; weight decay on matrices alone."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

RECIPE = """
defaults: [override /model: null, override /data: null, override /optimizer: adamw,
  override /objective: language_modelling, _self_]
model: {_target_: stories.tied_words.Writer, vocab_size: 9}
data: {_target_: stories.tied_words.Counting, vocab_size: 9}
optimizer: {lr: 0.01}
"""


class Counting(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, split: str, vocab_size: int) -> None:
        self.starts, self.vocab_size = torch.randint(vocab_size, (24,)), vocab_size

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = (self.starts[index] + torch.arange(8)) % self.vocab_size
        return row[:-1], row[1:]


class Writer(nn.Module):
    def __init__(self, vocab_size: int, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.memory = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.memory(self.embed(tokens))
        scores: Tensor = self.head(states)
        return scores
