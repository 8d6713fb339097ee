"""Speech: letters without their places in time (CTC); sounds and texts of unequal length."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from trainkit.objectives.base import Loss, Model, Objective

RECIPE = """
defaults: [override /model: null, override /data: null, override /optimizer: sgd, override /objective: null, _self_]
model: {_target_: stories.speech_ctc.Listener, letters: 5}
data: {_target_: stories.speech_ctc.Sounds, letters: 5}
objective: {_target_: stories.speech_ctc.Ctc}
"""


class Sounds(Dataset[dict[str, Tensor]]):
    def __init__(self, split: str, letters: int) -> None:
        self.texts = torch.randint(1, letters, (24, 4))
        self.lengths = torch.randint(2, 5, (24,))
        self.letters = letters

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        text, length = self.texts[index], self.lengths[index]
        sound = functional.one_hot(text, self.letters).float().repeat_interleave(3, 0) + 0.1 * torch.randn(
            12, self.letters
        )
        return {"sound": sound, "text": text, "length": length, "duration": 3 * length}


class Listener(nn.Module):
    def __init__(self, letters: int, width: int = 6) -> None:
        super().__init__()
        self.listen = nn.Conv1d(letters, width, 3, padding=1)
        self.write = nn.Linear(width, letters)

    def forward(self, sound: Tensor) -> Tensor:
        heard = torch.relu(self.listen(sound.transpose(1, 2))).transpose(1, 2)
        letters: Tensor = self.write(heard).log_softmax(-1)
        return letters


class Ctc(Objective):
    def loss(self, model: Model, batch: dict[str, Tensor]) -> Loss:
        letters = model(batch["sound"]).transpose(0, 1)
        losses = functional.ctc_loss(letters, batch["text"], batch["duration"], batch["length"], reduction="none")
        return Loss(loss_sum=losses.sum(), weight=float(len(losses)))
