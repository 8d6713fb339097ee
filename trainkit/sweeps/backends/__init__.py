"""Other systems that run the jobs of a sweep: submitit (SLURM, or this machine), Ray and Spark.

The sweep loop is the same as with the launcher `slots`: it decides about retries, resumes, pruning and output. A
backend only starts jobs: it receives one module-level function and the path of a file that describes the job.

    job_spec        the function that a backend runs, and the file that describes a job
    launching       the interface of a backend; describe jobs, submit them, and read their ends
    ray_tasks, spark_tasks, submitit_jobs    the backends
"""
