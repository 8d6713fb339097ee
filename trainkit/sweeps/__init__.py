"""Many runs of one command: their jobs, and the leaderboard of the results."""
