"""Masked words: some words of a sentence are hidden, other ones each time, and only these are predicted."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from trainkit.objectives.base import Loss, Supervised

RECIPE = """
defaults: [override /model: null, override /data: null, override /optimizer: sgd, override /objective: null, _self_]
model: {_target_: stories.masked_words.Reader, words: 12}
data: {_target_: stories.masked_words.Sentences, words: 12}
objective: {_target_: stories.masked_words.HiddenWords}
"""
HIDDEN = 0
NOT_HIDDEN = -100


class Sentences(Dataset[dict[str, Tensor]]):
    def __init__(self, split: str, words: int) -> None:
        self.sentences = (torch.randint(words - 1, (24, 1)) + torch.arange(8)) % (words - 1) + 1

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = self.sentences[index]
        hidden = torch.rand(len(words)) < 0.3  # keyed by epoch and sample, wherever it is read
        return {"input": words.masked_fill(hidden, HIDDEN), "target": words.masked_fill(~hidden, NOT_HIDDEN)}


class Reader(nn.Module):
    def __init__(self, words: int, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.randn(8, width))
        self.layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layer(self.embedding(words) + self.places))
        return scores


class HiddenWords(Supervised):
    def weight_per_sample(self, sample: object) -> None:
        """The words to predict are counted: each sample hides another number of them."""

    def planned_weight_per_sample(self, sample: object) -> float:
        return 2.0

    def score(self, outputs: Tensor, targets: Tensor) -> Loss:
        loss_sum = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")
        return Loss(loss_sum=loss_sum, weight=(targets != NOT_HIDDEN).sum(), outputs=outputs, targets=targets)
