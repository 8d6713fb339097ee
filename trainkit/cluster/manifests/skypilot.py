"""A task for SkyPilot: torchrun on every node, with the addresses that SkyPilot provides."""

from __future__ import annotations

from typing import Any, Final

from trainkit.cluster.manifests.job import SHARED, ManifestJob, ManifestWriter, block_yaml, linking


def _write(job: ManifestJob) -> str:
    options = job.options
    resources: dict[str, Any] = {}
    if job.gpus:
        resources["accelerators"] = f"{options['accelerator']}:{job.per_host}"
    if "image" in options:
        resources["image_id"] = f"docker:{options['image']}"
    document: dict[str, Any] = {"name": job.label, "num_nodes": job.hosts, "workdir": "."}
    if resources:
        document["resources"] = resources
    if "shared" in options:
        document["volumes"] = {SHARED: options["shared"]}
    if "setup" in options:
        document["setup"] = f"{options['setup']}\n"
    document["run"] = _script(job)
    return f"# {job.name} on {job.size}: sky launch FILE\n{block_yaml(document)}"


def _script(job: ManifestJob) -> str:
    lines = [linking(SHARED)] if "shared" in job.options else []
    group = "--standalone"
    if job.hosts > 1:
        lines.append('head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)')
        group = (
            '--nnodes="$SKYPILOT_NUM_NODES" --node-rank="$SKYPILOT_NODE_RANK" '
            '--master-addr="$head" --master-port=29500 --rdzv-id="$SKYPILOT_TASK_ID"'
        )
    lines += [f"torchrun {group} --nproc-per-node={job.per_host} \\"]
    lines += [f"    -m trainkit {job.shell_arguments}".rstrip(), ""]
    return "\n".join(lines)


SKYPILOT: Final = ManifestWriter(
    write=_write,
    kind="torchrun",
    options=("accelerator", "image", "setup", "shared"),
    gpus_need=("accelerator",),
    hosts_need=("shared",),
)
