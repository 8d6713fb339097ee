"""The coordinator: it gives work to workers, schedules updates and keeps the update log."""
