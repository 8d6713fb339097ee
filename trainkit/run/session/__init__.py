"""The work of one rank around the training loop: checkpoints, evaluation, triggers and restoring."""
