"""The loop over tickets, and what it keeps: state, evaluation, checkpoints."""
