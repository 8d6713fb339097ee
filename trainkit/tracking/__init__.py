"""Send runs to trackers (Trackio, Weights & Biases, MLflow) from the run folder, in a thread."""

from trainkit.names import lazy

__getattr__ = lazy(__name__)
