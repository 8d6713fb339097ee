"""Run the jobs of a sweep: choose the time, the devices and the process of each job."""
