"""Policy gradient from recorded episodes: actions weighted by their returns, with a value head as the baseline."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainkit.objectives.base import Loss, Metric, Model, Objective
from trainkit.objectives.metrics import MeanOf

RECIPE = """
defaults: [override /model: null, override /data: null, override /optimizer: sgd, override /objective: null, _self_]
model: {_target_: stories.policy_gradient.ActorCritic}
data: {_target_: stories.policy_gradient.Episodes}
objective: {_target_: stories.policy_gradient.AdvantageLoss, entropy: 0.01}
"""


class Episodes(Dataset[tuple[Tensor, Tensor, Tensor]]):
    def __init__(self, split: str) -> None:
        self.states, self.actions = torch.randn(30, 4), torch.randint(3, (30,))
        self.returns = (self.states[:, :3].argmax(1) == self.actions).float() - 0.5

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.states[index], self.actions[index], self.returns[index]


class ActorCritic(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.Tanh())
        self.actor, self.critic = nn.Linear(width, 3), nn.Linear(width, 1)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(states)
        return self.actor(hidden), self.critic(hidden).squeeze(1)


class AdvantageLoss(Objective):
    def __init__(self, entropy: float) -> None:
        self.entropy = entropy

    def loss(self, model: Model, batch: tuple[Tensor, Tensor, Tensor]) -> Loss:
        states, actions, returns = batch
        scores, values = model(states)
        logs = scores.log_softmax(1)
        advantage = (returns - values).detach()
        chosen = logs.gather(1, actions[:, None]).squeeze(1)
        critic = (returns - values).square().sum()
        bonus = (logs.exp() * logs).sum(1).mean()  # already a mean over the shard
        return Loss(
            loss_sum=0.5 * critic - (advantage * chosen).sum(),
            weight=float(len(states)),
            extra=self.entropy * bonus,
            outputs=scores,
            targets=actions,
        )

    def metrics(self) -> dict[str, Metric]:
        return {"agreement": MeanOf(lambda scores, actions: ((scores.argmax(1) == actions).sum(), len(actions)))}
