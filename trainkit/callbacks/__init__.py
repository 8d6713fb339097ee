"""What looks on while a run goes: one file a callback."""
