"""A variational autoencoder: the model draws its latent code, and the loss is reconstruction plus a divergence."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from trainkit import Loss, MeanOf, Metric, Model, Objective

RECIPE = """
defaults: [override /model: null, override /data: null, override /optimizer: sgd, override /objective: null, _self_]
model: {_target_: stories.vae.Vae, codes: 2}
data: {_target_: stories.vae.Bars}
objective: {_target_: stories.vae.Elbo, beta: 0.5}
"""


class Bars(Dataset[Tensor]):
    def __init__(self, split: str) -> None:
        self.images = (torch.rand(24, 4, 1) > 0.5).float().expand(24, 4, 4).clone()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        return self.images[index].flatten()


class Vae(nn.Module):
    def __init__(self, codes: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 2 * codes))
        self.decoder = nn.Sequential(nn.Linear(codes, 12), nn.ReLU(), nn.Linear(12, 16))

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(pixels).chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(code), mean, log_variance


class Elbo(Objective):
    def __init__(self, beta: float) -> None:
        self.beta = beta

    def loss(self, model: Model, batch: Tensor) -> Loss:
        scores, mean, log_variance = model(batch)
        likelihood = functional.binary_cross_entropy_with_logits(scores, batch.to(scores.dtype), reduction="sum")
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum()
        weight = float(len(batch))
        return Loss(loss_sum=likelihood + self.beta * divergence, weight=weight, outputs=scores, targets=batch)

    def metrics(self) -> dict[str, Metric]:
        return {"pixels": MeanOf(lambda scores, pixels: (((scores > 0) == (pixels > 0.5)).sum(), pixels.numel()))}
