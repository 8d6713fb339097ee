"""The coordinator: it assigns work to workers, schedules updates and keeps the update log."""
