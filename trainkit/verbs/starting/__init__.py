"""Commands that write what starts a run elsewhere, or completes a command line."""
