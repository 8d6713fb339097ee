"""What the jobs of a sweep gave: results, leaderboard, folds and ensembles."""
