"""A shell script that runs torchrun: on one host, or with the same command on each of several."""

from __future__ import annotations

from typing import Final

from trainkit.cluster.manifests.job import ManifestJob, ManifestWriter


def _write(job: ManifestJob) -> str:
    lines = ["#!/usr/bin/env bash", *_usage(job), "set -euo pipefail"]
    if "setup" in job.options:
        lines.append(job.options["setup"])
    if "min-hosts" in job.options:
        # The agents' store ends with the first agent: a host that returns would wait for it forever.
        lines.append("export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
    flags = [*_group(job), f"--nproc-per-node={job.per_host}"]
    if "restarts" in job.options:
        flags.append(f"--max-restarts={job.options['restarts']}")
    command = " \\\n    ".join([" ".join(["exec torchrun", *flags]), f"-m trainkit {job.shell_arguments}".rstrip()])
    return "\n".join([*lines, command, ""])


def _usage(job: ManifestJob) -> list[str]:
    if job.hosts == 1:
        return [f"# {job.name} on {job.size}: bash FILE"]
    return [
        f"# {job.name} on {job.size}: run the same line on each, bash FILE NAME.",
        "# NAME is any word; another NAME is another launch. All hosts see this folder under the same path.",
    ]


def _group(job: ManifestJob) -> list[str]:
    """Return torchrun's rendezvous flags of several hosts."""
    if job.hosts == 1:
        return ["--standalone"]
    head, port = job.options["head"], job.options.get("port", "29400")
    hosts = f"{job.options['min-hosts']}:{job.hosts}" if "min-hosts" in job.options else str(job.hosts)
    return [
        f"--nnodes={hosts}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={f'[{head}]' if ':' in head else head}:{port}",
        '--rdzv-id="${1:?give the launch a NAME, the same on every host}"',
    ]


TORCHRUN: Final = ManifestWriter(
    write=_write,
    kind="torchrun",
    options=("setup", "head", "port", "restarts", "min-hosts"),
    hosts_need=("head",),
)
