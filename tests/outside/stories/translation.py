"""Translation: an encoder and a decoder; sentences of unequal length, padded, whose words are counted."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from trainkit import Loss, Model, Objective

RECIPE = """
defaults: [override /model: null, override /data: null, override /optimizer: sgd, override /objective: null, _self_]
model: {_target_: stories.translation.Translator, vocab_size: 10}
data: {_target_: stories.translation.Pairs, vocab_size: 10}
objective: {_target_: stories.translation.NextWord}
"""
PADDING = 0


class Pairs(Dataset[dict[str, Tensor]]):
    def __init__(self, split: str, vocab_size: int) -> None:
        self.lengths = torch.randint(2, 7, (24,))
        self.sources = torch.randint(1, vocab_size, (24, 6)) * (torch.arange(6) < self.lengths[:, None])

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        source = self.sources[index]
        return {"source": source, "translation": torch.cat([torch.ones(1).long(), source.flip(0)])}


class Translator(nn.Module):
    def __init__(self, vocab_size: int, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.encoder = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.1, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(width, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.embed.weight  # tied

    def forward(self, source: Tensor, before: Tensor) -> Tensor:
        later = torch.ones(before.shape[1], before.shape[1], dtype=torch.bool, device=before.device).triu(1)
        memory = self.encoder(self.embed(source))
        scores: Tensor = self.head(self.decoder(self.embed(before), memory, tgt_mask=later))
        return scores


class NextWord(Objective):
    def weight_per_sample(self, sample: object) -> None:
        """Padding does not count."""

    def planned_weight_per_sample(self, sample: object) -> float:
        return 4.0

    def loss(self, model: Model, batch: dict[str, Tensor]) -> Loss:
        before, after = batch["translation"][:, :-1], batch["translation"][:, 1:]
        scores = model(batch["source"], before)
        loss_sum = functional.cross_entropy(
            scores.flatten(0, 1), after.flatten(), ignore_index=PADDING, reduction="sum"
        )
        return Loss(loss_sum=loss_sum, weight=(after != PADDING).sum(), outputs=scores, targets=after)
