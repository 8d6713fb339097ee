"""Train over tickets: the loop, its state, evaluation and checkpoints."""
