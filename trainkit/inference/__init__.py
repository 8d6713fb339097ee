"""Run a trained model on data: evaluations, predictions, texts."""
