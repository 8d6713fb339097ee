"""What strategies share that cut parameters over ranks: where a part lies, saving and restoring it, norms, steps."""
