"""A batch script for SLURM: one srun, with one task per replica."""

from __future__ import annotations

from trainkit.cluster.manifests.job import ManifestJob, roles_in


def write(job: ManifestJob) -> str:
    """Return the batch script of a job."""
    total, options = sum(job.roles.values()), job.options
    header = {
        "job-name": job.name,
        "nodes": job.hosts,
        "ntasks-per-node": -(-total // job.hosts) or job.per_host,
        # All GPUs of a node are visible to each of its tasks, which takes the one of its local rank.
        "gpus-per-node": job.per_host if job.gpus else None,
        "cpus-per-task": options.get("cpus-per-process"),
        **{name: options.get(name) for name in ("time", "partition", "account")},
    }
    head = [f"# {job.name} on {job.size}: sbatch FILE"]
    head += [f"#SBATCH --{name}={value}" for name, value in header.items() if value is not None]
    # Since SLURM 22.05, srun does not inherit --cpus-per-task from the job.
    cpus = f"--cpus-per-task={options['cpus-per-process']} " if "cpus-per-process" in options else ""
    # A task that fails ends the step: otherwise the others would wait for it until their timeout.
    srun, command = f"exec srun --kill-on-bad-exit=1 {cpus}", job.shell("python", "-m", "trainkit")
    lines = _with_roles(job, srun, command) if job.roles else [f"{srun}{command}"]
    return job.script([*head, "set -euo pipefail"], lines)


def _with_roles(job: ManifestJob, srun: str, command: str) -> list[str]:
    """Return the lines that give each task its TF_CONFIG: task r of the step is on node r modulo their number."""
    tasks = " ".join(f"{role}:{index}" for role, index in roles_in(job.roles))
    return [
        'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        f"tasks=({tasks})",
        # Jobs that share a node meet at ports of their own.
        "port=$((20000 + SLURM_JOB_ID % 600 * 20))",
        "declare -A members=()",
        'for rank in "${!tasks[@]}"; do',
        '    address="${nodes[rank % ${#nodes[@]}]}:$((port + rank / ${#nodes[@]}))"',
        '    members[${tasks[rank]%:*}]+="${members[${tasks[rank]%:*}]:+, }\\"$address\\""',
        "done",
        "cluster=",
        *(f'cluster+="${{cluster:+, }}\\"{role}\\": [${{members[{role}]}}]"' for role in job.roles),
        'export TRAINKIT_EMITTED_CLUSTER="$cluster" TRAINKIT_EMITTED_TASKS="${tasks[*]}"',
        f"{srun}--ntasks={sum(job.roles.values())} --distribution=cyclic bash -c '",
        "    tasks=($TRAINKIT_EMITTED_TASKS) task=${tasks[SLURM_PROCID]}",
        '    task="{\\"type\\": \\"${task%:*}\\", \\"index\\": ${task#*:}}"',
        '    export TF_CONFIG="{\\"cluster\\": {$TRAINKIT_EMITTED_CLUSTER}, \\"task\\": $task}"',
        f'    exec "$@"\' bash {command}',
    ]
