"""Start the processes of ranks, read their reports, and end them."""
