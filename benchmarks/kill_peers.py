"""Kill one of three ranks in trainkit, torchrun with DDP, Lightning and Accelerate, and measure what follows.

python benchmarks/kill_peers.py [--rounds 3]

Every trainer trains the same layers on as many samples, on three CPU processes that exchange by gloo, and saves every
five steps. In the forward pass of a step, a rank kills itself with SIGKILL, once. The table gives the longest time
between two steps (the recovery), whether the run ended with every step trained, and whether its weights are those of
the same trainer undisturbed, by SHA-256. The rounds are interleaved. A peer's script does what its documentation shows:
it saves and loads a checkpoint of model, optimizer and step, and its sampler begins again where the checkpoint says.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

RANKS: Final = 3
STEPS: Final = 60
EVERY: Final = 5
LIMIT_S: Final = 90.0
"""Seconds without a step after which a run counts as hanging."""
_TORCHRUN: Final = [
    "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=3",
    "--monitor-interval=0.1", __file__,
]  # fmt: skip
"""As documented for one host. Without `--standalone`, restarted ranks of torch 2.13 did not join again."""
LAUNCHES: Final[dict[str, tuple[str, list[str]]]] = {
    "trainkit": ("trainkit", [
        "-m", "trainkit", "recipe=digits", "strategy=mirrored", f"strategy.replicas={RANKS}", "epochs=null",
        f"steps={STEPS}", "log_every_steps=1", f"checkpoint.every_steps={EVERY}", "callbacks=[]", "logger=[]",
        "hydra.run.dir=run",
    ]),
    "torchrun, DDP": ("torch", [*_TORCHRUN, "--peer=ddp"]),
    "torchrun, Accelerate": ("accelerate", [*_TORCHRUN, "--peer=accelerate"]),
    "torchrun, Lightning": ("lightning", [*_TORCHRUN, "--peer=lightning"]),
    "Lightning alone": ("lightning", [__file__, "--peer=lightning"]),
}  # fmt: skip
"""Trainer -> the package it needs, and its arguments of Python."""


def model_and_data() -> tuple[Any, Any, Any]:
    """Return the layers of recipe=digits and as many random samples: (1437, 64) float32 and their classes."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, torch.randn(1437, 64), torch.randint(0, 10, (1437,))


def indices_of(step: int, rank: int) -> Any:
    """Return the samples of a rank in a step, of a permutation that only the epoch decides."""
    import torch

    size = 1437 // 63
    order = torch.randperm(1437, generator=torch.Generator().manual_seed(step // size))
    return order[step % size * 63 :][rank:63:RANKS]


def kill_planned(step: int, rank: int) -> None:
    """End this process with SIGKILL, if it is the one that is told to, for the first time."""
    if os.environ.get("KILL") == f"{rank}:{step}" and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def log_step(step: int) -> None:
    """Add the row of a step; of rank 0."""
    with Path("steps.jsonl").open("a") as file:
        file.write(json.dumps({"step": step}) + "\n")


def write_sha256(model: Any) -> None:
    """Write the hash of the trained weights; of rank 0."""
    digest = hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in model.state_dict().values()))
    Path("sha256").write_text(digest.hexdigest())


def ddp() -> None:
    """Train a hand-written loop over DistributedDataParallel."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional

    dist.init_process_group("gloo")
    model, inputs, targets = model_and_data()
    wrapped, rank, step = torch.nn.parallel.DistributedDataParallel(model), dist.get_rank(), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if Path("last.pt").exists():
        saved = torch.load("last.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    while step < STEPS:
        kill_planned(step + 1, rank)
        chosen = indices_of(step, rank)
        optimizer.zero_grad()
        functional.cross_entropy(wrapped(inputs[chosen]), targets[chosen]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        step += 1
        if rank == 0:
            log_step(step)
            if step % EVERY == 0:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "new.pt")
                Path("new.pt").replace("last.pt")
    if rank == 0:
        write_sha256(model)
    dist.barrier()
    dist.destroy_process_group()


def accelerate() -> None:
    """Train a loop of Accelerate, with its own saved states."""
    import torch
    from accelerate import Accelerator
    from torch.nn import functional

    accelerator = Accelerator(cpu=True)
    model, inputs, targets = model_and_data()
    wrapped, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    rank, step = accelerator.process_index, 0
    if Path("last").exists():
        saved = Path("last").readlink().name
        accelerator.load_state(saved)
        step = int(saved.removeprefix("state-"))
    while step < STEPS:
        kill_planned(step + 1, rank)
        chosen = indices_of(step, rank)
        optimizer.zero_grad()
        accelerator.backward(functional.cross_entropy(wrapped(inputs[chosen]), targets[chosen]))
        optimizer.step()
        step += 1
        if rank == 0:
            log_step(step)
        if step % EVERY == 0:
            accelerator.save_state(f"state-{step}")
            accelerator.wait_for_everyone()
            if rank == 0:
                Path("new").symlink_to(f"state-{step}")
                Path("new").replace("last")
    if rank == 0:
        write_sha256(accelerator.unwrap_model(wrapped))
    accelerator.wait_for_everyone()


def lightning() -> None:
    """Train with Lightning's Trainer, its checkpoints of every few steps, and `ckpt_path="last"`."""
    import lightning as pl
    import torch
    from torch.nn import functional
    from torch.utils.data import DataLoader, Dataset, Sampler

    model, inputs, targets = model_and_data()

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Any:
            del index
            kill_planned(self.global_step + 1, self.global_rank)
            return functional.cross_entropy(self.model(inputs[batch]), targets[batch])

        def on_train_batch_end(self, *_: object) -> None:
            if self.global_rank == 0:
                log_step(self.global_step)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    class Numbers(Dataset[int]):
        def __len__(self) -> int:
            return 1437

        def __getitem__(self, index: int) -> int:
            return index

    class Order(Sampler[list[int]]):
        def __len__(self) -> int:
            return STEPS

        def __iter__(self) -> Any:
            done = module.trainer.global_step
            yield from (indices_of(step, module.global_rank).tolist() for step in range(done, STEPS))

    module = Module()
    saving = pl.pytorch.callbacks.ModelCheckpoint(
        dirpath="checkpoints", every_n_train_steps=EVERY, save_last=True, save_top_k=1
    )
    trainer = pl.Trainer(
        strategy="ddp", accelerator="cpu", devices=RANKS, max_steps=STEPS, callbacks=[saving], logger=False,
        use_distributed_sampler=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    last = "last" if Path("checkpoints/last.ckpt").exists() else None
    trainer.fit(module, DataLoader(Numbers(), batch_sampler=Order()), ckpt_path=last)
    if trainer.is_global_zero:
        write_sha256(model)


PEERS: Final = {"ddp": ddp, "accelerate": accelerate, "lightning": lightning}


def run(name: str, kill: tuple[int, int] | None) -> tuple[str, float]:
    """Train with a trainer; return the hash of its weights or what became of it, and the longest time in seconds
    between two steps.
    """
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        rows = Path(folder, "run/metrics.jsonl" if name == "trainkit" else "steps.jsonl")
        # Else restarted ranks read the addresses of dead ones in torch 2.13, and a run ends by chance: pytorch#135712.
        environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        if kill is not None:
            rank, step = kill
            environ["KILL"] = f"{rank}:{step}"
            environ["TRAINKIT_FAIL"] = f"rank={rank},step={step},phase=forward,attempt=0,action=kill"
        process = subprocess.Popen(
            [sys.executable, *LAUNCHES[name][1]], cwd=folder, env=environ, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        size, moments, changed = 0, list[float](), time.monotonic()
        while process.poll() is None and time.monotonic() - changed < LIMIT_S:
            if rows.exists() and (size_now := rows.stat().st_size) > size:
                size, changed = size_now, time.monotonic()
                moments.append(changed)
            time.sleep(0.005)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"no step for {LIMIT_S:.0f} s", 0.0
        gap_s = max((later - earlier for earlier, later in pairwise(moments)), default=0.0)
        if process.returncode:
            return f"ended, exit code {process.returncode}", gap_s
        if kill is not None and name != "trainkit" and not Path(folder, "killed").exists():
            return "was not killed", gap_s
        if name == "trainkit":
            return str(json.loads(Path(folder, "run/result.json").read_text())["weights_sha256"]), gap_s
        return Path(folder, "sha256").read_text(), gap_s


def main() -> None:
    """Run the rounds, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        PEERS[options.peer]()
        return
    names = [name for name, (package, _) in LAUNCHES.items() if find_spec(package)]
    numbers, undisturbed = random.Random(7), {name: run(name, None)[0] for name in names}
    if failed := {name: outcome for name, outcome in undisturbed.items() if len(outcome) != 64}:
        sys.exit(f"do not train undisturbed: {failed}")
    outcomes, gaps = defaultdict[str, list[str]](list), defaultdict[str, list[float]](list)
    for _ in range(options.rounds):
        kill = (numbers.randrange(RANKS), numbers.randrange(2 * EVERY, STEPS - EVERY))
        for name in names:
            weights, gap_s = run(name, kill)
            is_hash = len(weights) == 64
            verdict = "the same bits" if weights == undisturbed[name] else "OTHER BITS" if is_hash else weights
            outcomes[name].append(verdict)
            print(f"{name}, rank {kill[0]} in step {kill[1]}: {verdict}, {gap_s:.2f} s", file=sys.stderr, flush=True)
            gaps[name] += [gap_s] if is_hash else []
    print("| trainer | after SIGKILL of a rank | next step after, s (median) |\n|---|---|---:|")
    for name in names:
        counts = ", ".join(f"{outcomes[name].count(outcome)} x {outcome}" for outcome in dict.fromkeys(outcomes[name]))
        seconds = f"{statistics.median(gaps[name]):.2f}" if gaps[name] else "-"
        print(f"| {name} | {counts} | {seconds} |")


if __name__ == "__main__":
    main()
