"""Objectives: the loss of a shard, as a sum with its weight, and the metrics of a task.

They know no strategy: they get a model and a batch, and say in `needs` what else of the model they use.
"""

from trainkit.names import lazy

__getattr__ = lazy(__name__)
