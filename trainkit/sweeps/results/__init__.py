"""The results of a sweep's jobs: leaderboard, folds and ensembles."""
