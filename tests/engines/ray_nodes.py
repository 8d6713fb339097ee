"""A Ray cluster of this machine: ray_nodes.py FOLDER; says its address, then does `add` and `remove` from stdin."""

import os
import sys
from pathlib import Path

# Where Ray notes the address of the newest cluster: in a folder that it takes to be there.
os.environ["RAY_TMPDIR"] = sys.argv[1]
Path(sys.argv[1], "ray").mkdir()

from ray.cluster_utils import Cluster  # noqa: E402 - reads the variable


def print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, "temp_dir": sys.argv[1]}
    )
    print_line(cluster.address)
    nodes = []
    for line in sys.stdin:
        if line.strip() == "add":
            nodes.append(cluster.add_node(num_cpus=1))
        else:
            cluster.remove_node(nodes.pop(), allow_graceful=False)
        print_line("done")
    cluster.shutdown()
