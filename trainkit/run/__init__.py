"""One training from plan to folder: runner, supervisor, worker, folder."""
