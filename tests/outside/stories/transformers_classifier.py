"""A classifier of transformers: the library's own model by its `_target_`, with a loss that the model computes."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

RECIPE = """
defaults: [override /model: null, override /data: null, override /optimizer: sgd, override /objective: own_loss, _self_]
model:
  _target_: transformers.BertForSequenceClassification
  config:
    _target_: transformers.BertConfig
    vocab_size: 32
    hidden_size: 8
    num_hidden_layers: 2
    num_attention_heads: 2
    intermediate_size: 16
    max_position_embeddings: 16
    num_labels: 3
data: {_target_: stories.transformers_classifier.Comments}
"""


class Comments(Dataset[dict[str, Tensor]]):
    def __init__(self, split: str) -> None:
        self.tokens = torch.randint(1, 32, (24, 10))
        self.lengths = torch.randint(4, 11, (24,))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        mask = torch.arange(10) < self.lengths[index]
        ids = self.tokens[index] * mask
        return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.sum() % 3}
