"""What is sent to each tracker; no module here imports torch."""
