"""The metric: it counts per batch, and adds up the counts of all processes once, at the end."""

from trainkit import Collective, Loss, Metric, RunningMean


class Correct(Metric):
    """The share of samples whose score is on the right side of zero."""

    def __init__(self) -> None:
        self.right = RunningMean()

    def update(self, loss: Loss, batch: object) -> None:
        """Count one batch."""
        hits = (loss.outputs > 0) == (loss.targets == 1)
        self.right.add(hits.sum(), hits.numel())

    def compute(self, collective: Collective) -> float:
        """Return the share over all processes."""
        return self.right.mean(collective)
