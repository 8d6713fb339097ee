"""A line of shell for each task, to run on its host: with TF_CONFIG, or with the config's cluster=spec."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from trainkit.cluster.manifests.job import ManifestJob, ManifestWriter, members_on, roles_in, tf_config

_PORT: Final = 2222
"""The first port of a host: TensorFlow's."""
Members = Mapping[str, Sequence[str]]


def members_of(job: ManifestJob) -> dict[str, list[str]]:
    """Return role -> addresses of a job whose hosts are named."""
    port = int(job.options.get("port", _PORT))
    return members_on(job.counts, job.options["names"].split(","), port=port)


def _lines(job: ManifestJob, command: Callable[[Members, str, int], str]) -> Iterator[str]:
    members = members_of(job)
    yield f"# {job.name} on {job.size}: run each line on its host. All hosts see this folder under the same path."
    for role, index in roles_in(job.counts):
        yield f"# {role}:{index} on {members[role][index].rpartition(':')[0]}"
        yield command(members, role, index)


def _with_tf_config(job: ManifestJob) -> str:
    def command(members: Members, role: str, index: int) -> str:
        variable = f"TF_CONFIG={shlex.quote(tf_config(members, role, index))}"
        return f"{variable} python -m trainkit {job.shell_arguments}".rstrip()

    return "\n".join([*_lines(job, command), ""])


def _with_spec(job: ManifestJob) -> str:
    def command(members: Members, role: str, index: int) -> str:
        lists = (f"cluster.{name}=[{','.join(map(_quoted, texts))}]" for name, texts in members.items())
        keys = shlex.join(["cluster=spec", *lists, f"cluster.task={role}:{index}"])
        return f"python -m trainkit {job.shell_arguments} {keys}".replace("  ", " ")

    return "\n".join([*_lines(job, command), ""])


def _quoted(address: str) -> str:
    return f'"{address}"' if address.startswith("[") else address


TF_CONFIG: Final = ManifestWriter(
    write=_with_tf_config, kind="TF_CONFIG", options=("names", "port"), needs=("names",), takes_roles=True
)
SPEC: Final = ManifestWriter(
    write=_with_spec, kind="cluster=spec", options=("names", "port"), needs=("names",), takes_roles=True
)
