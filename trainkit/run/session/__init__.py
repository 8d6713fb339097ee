"""What one rank does around the training loop: checkpoints, evaluation, triggers and restoring."""
