"""Engines that start the processes of a run on a cluster of their own: Ray, Spark."""
