"""Send runs to trackers (Trackio, Weights & Biases, MLflow) from the run folder, in a separate process."""
