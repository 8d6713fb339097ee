"""The training loop over tickets, with its state, evaluation and checkpoints."""
