"""A line of shell for each task, to run on its host: with TF_CONFIG, or with the config's cluster=spec."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from trainkit.cluster.manifests.job import ManifestJob, members_on, roles_in, tf_config

_PORT: Final = 2222
"""The first port of a host: TensorFlow's."""
Members = Mapping[str, Sequence[str]]


def _write(job: ManifestJob, command: Callable[[Members, str, int], str]) -> str:
    members = members_on(job.counts, job.options["names"].split(","), port=int(job.options.get("port", _PORT)))
    lines = [f"# {job.name} on {job.size}: run each line on its host. All hosts see this folder under the same path."]
    for role, index in roles_in(job.counts):
        lines.append(f"# {role}:{index} on {members[role][index].rpartition(':')[0]}")
        lines.append(command(members, role, index))
    return "\n".join([*lines, ""])


def write_tf_config(job: ManifestJob) -> str:
    """Return the lines of a job, each with its TF_CONFIG."""

    def command(members: Members, role: str, index: int) -> str:
        return f"TF_CONFIG={shlex.quote(tf_config(members, role, index))} {job.shell('python', '-m', 'trainkit')}"

    return _write(job, command)


def write_spec(job: ManifestJob) -> str:
    """Return the lines of a job, each with all tasks as keys of the config."""

    def command(members: Members, role: str, index: int) -> str:
        quoted = {name: [f'"{text}"' if text[0] == "[" else text for text in texts] for name, texts in members.items()}
        lists = (f"cluster.{name}=[{','.join(texts)}]" for name, texts in quoted.items())
        keys = shlex.join(["cluster=spec", *lists, f"cluster.task={role}:{index}"])
        return f"{job.shell('python', '-m', 'trainkit')} {keys}"

    return _write(job, command)
