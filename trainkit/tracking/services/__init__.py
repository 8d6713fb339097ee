"""The service of each tracker; no module here imports torch."""
