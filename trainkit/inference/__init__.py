"""What a trained model computes on data: evaluations, predictions, texts."""
