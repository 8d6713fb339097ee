"""Other engines that run the jobs of a sweep: joblib, submitit (SLURM, or this machine) and Ray.

The sweep itself is that of `slots`: what is retried, resumed, pruned and shown is decided here; an engine only starts
what it is handed, and is handed one function of a module and the path of a file that describes the job.

    described   what an engine runs: the function, and what the file says
    starting    the other side: describes jobs, hands them over, and sees how they end
    base        what an engine is
    local       joblib's workers; ray and submitit below their own names
"""
