"""Process backends, which start the processes of a run on their own cluster: Ray, Spark."""
