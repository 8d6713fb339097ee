"""Many runs of one command: jobs, one after the other, and the leaderboard of what came out."""
