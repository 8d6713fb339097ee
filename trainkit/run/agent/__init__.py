"""The parent process of the ranks: it starts attempts, finds the first failure, and restarts or resizes the run."""
