"""The verbs of the command line, `trainkit VERB`, one module each."""
