"""The verbs: their folders, flags, arguments and texts; a verb is imported only when it runs."""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

from trainkit.config.values import MOST_PROCESSES, whole_number
from trainkit.redaction import mask


class Flag(NamedTuple):
    """A flag of a verb."""

    name: str
    """`--steps N`, with the name of its value if it takes one."""
    about: str
    read: Callable[[str], Any] = str
    """Returns its value; raises ArgumentTypeError with the rule that the text breaks."""


class Verb(NamedTuple):
    """One verb, in the module `trainkit.verbs.FOLDER.VERB`, whose function `run` takes the call."""

    folder: str
    usage: str
    example: str
    about: str
    flags: tuple[Flag, ...] = ()
    arguments: tuple[int, float] | None = (0, 0)
    """The least and the largest number of its arguments; None: the verb checks them."""
    paths: float = 0
    """Number of arguments that are paths. A word with `=` is a path where one is missing and it exists."""
    words: tuple[str, ...] = ()
    """Possible values of its argument, for completion."""
    overrides: bool = True
    """Whether it takes key=value."""
    composes: bool = False
    """Whether they are those of a training; a comma list names several."""
    combines: bool = False
    """Whether its module has `problems`, the rules about several of its flags and arguments."""


def whole(least: int, most: int = 10**9) -> Callable[[str], int]:
    """Return the type of a flag that is a whole number."""

    def read(text: str) -> int:
        number = whole_number(text, low=least, high=most)
        if number is None:
            raise ArgumentTypeError(f"must be a whole number, {least:,} to {most:,}.")
        return number

    return read


def one_of(*words: str) -> Callable[[str], str]:
    """Return the type of a flag that is one of some words."""
    return _text(f"must be {', '.join(words[:-1])} or {words[-1]}.", words.__contains__)


def _text(rule: str, accepts: Callable[[str], object]) -> Callable[[str], str]:
    """Return the type of a flag whose text must be accepted."""

    def read(text: str) -> str:
        if not accepts(text):
            raise ArgumentTypeError(rule)
        return text

    return read


def _command(text: str) -> str:
    """Return the command of `--setup`."""
    if mask(text) != text:
        raise ArgumentTypeError("contains a password in a URL. Read it from a file or a variable on the host instead.")
    return _text("must be one line. Put longer text into a script of your own.", str.isprintable)(text)


def _rate(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise ArgumentTypeError("must be a number above 0.")


_word: Final = _text(
    "must be one word of letters, digits and . _ : / @ , + -.", re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@,+-]*").fullmatch
)
_time: Final = _text(
    "must be [DAYS-]HH:MM:SS, as in 12:00:00.", re.compile(r"(\d+-)?\d{1,3}:[0-5]\d:[0-5]\d").fullmatch
)
_JSON: Final = Flag("--json", "print one JSON document, whose schema trainkit schema prints")
_CHECKPOINT: Final = Flag(
    "--checkpoint WHICH", "the checkpoint of a run: last, or best; last without it", one_of("best", "last")
)
_DATA: Final = (
    Flag("--num-samples N", "length of the training data, if its class does not declare it", whole(1, 10**15)),
    Flag("--open-data", "read the data, if its class does not declare its samples"),
)
"""Flags of verbs that plan a run without opening its data."""
_ORDER: Final = (
    Flag("--metric NAME", "the metric for the order; val/loss without it"),
    Flag("--mode MODE", "whether the smallest (min) or the largest (max) value is best", one_of("min", "max")),
)
_TURN_STEPS: Final = Flag("--steps N", "measured steps of a turn; without it, those of two seconds", whole(1, 100_000))
QUANTIZED: Final = "the format: int8_weight, int8_dynamic, int4_weight or int8_static"
ENGINES: Final = ("torchrun", "slurm", "kubernetes", "vertex", "skypilot", "mpirun", "tf_config", "spec")
_PROCESSES: Final = whole(1, MOST_PROCESSES)

VERBS: Final[Mapping[str, Verb]] = {
    "train": Verb(
        "running", "[-m] OVERRIDES", "recipe=digits strategy=mirrored",
        "train; the default without a verb. -m runs every combination of comma lists",
        composes=True),
    "plan": Verb(
        "looking", "OVERRIDES", "strategy=mirrored strategy.replicas=4",
        "print the whole run without starting it: tasks, batch, rates, memory",
        (
            Flag("--world N", "plan for a host with this many GPUs", whole(0, MOST_PROCESSES)),
            Flag("--hosts N", "plan for this many hosts, with --gpus-per-host", _PROCESSES),
            Flag("--gpus-per-host N", "GPUs per host of --hosts, with one task per GPU", _PROCESSES),
            *_DATA,
            Flag("--fail-if-too-big", "end with exit code 2 if the run does not fit into the memory of hardware=..."),
            Flag("--rate-png FILE", "draw the learning rate into this PNG"),
            _JSON,
        ), composes=True),
    "prove": Verb(
        "running", "strategy=A[,B...] OVERRIDES, or --layouts N, --static or --resume OVERRIDES", "strategy=mirrored",
        "compare strategies, or every mesh of N ranks, step by step with one device",
        (
            Flag("--steps N", "optimizer steps to compare; 10 without it, 4 with --layouts", whole(1, 1_000_000)),
            Flag("--layouts N", "compare every mesh of this many ranks, 2 to 8", whole(2, 8)),
            Flag("--static", "read without training how often every mesh sums each gradient, and over which ranks"),
            Flag("--world N", "with --static: the largest number of ranks; 1024 without it", whole(2, MOST_PROCESSES)),
            Flag("--resume", "interrupt the first training at a random step, resume it on each strategy, and compare"),
            Flag("--same-cut", "compare only the numbers, with the same batch.micro_size"),
            Flag("--all", "print a line for every parameter, even if all are equal"),
            _JSON._replace(about="with --layouts or --static: " + _JSON.about),
        ), composes=True, combines=True),
    "compare": Verb(
        "running", "A B [OVERRIDES of both]   (A, B: folders of runs, or quoted sets of overrides)",
        "optimizer.lr=0.01 optimizer.lr=0.02 recipe=digits",
        "is B better than A? Reads runs of both, or trains them with equal seeds; alone: list the answers",
        (
            Flag("--pairs N", "seeds to train of each; 5 without it", whole(1, 10_000)),
            Flag("--until-sure", "add pairs until the answer holds, or more than --max-pairs would be needed"),
            Flag("--max-pairs N", "pairs in all; 30 without it", whole(1, 10_000)),
            Flag("--delta X", "differences that do not matter: may answer the same within X", _rate),
            Flag("--edits N", "comparisons of a series: each is wrong with a probability of 0.05 / N", whole(1)),
            *_ORDER,
            _JSON,
        ), None, paths=2),
    "bench": Verb(
        "measuring", "KEY=A,B[,C...] OVERRIDES", "strategy=one_device,mirrored",
        "measure the same training with several choices, in turns",
        (
            Flag("--rounds N", "turns of each choice; 3 without it, 1 with --until", whole(1, 1_000)),
            _TURN_STEPS,
            Flag("--until METRIC=VALUE", "measure the time to a result instead: --until val/accuracy=0.9"),
            Flag("--data", "find whether the loader or the model limits the training, and which loader.num_workers to "
                 "use"),
            _JSON,
            Flag("--out FOLDER", "folder of the results; without it, a new one below outputs/bench"),
        ), composes=True, combines=True),
    "find": Verb(
        "measuring", "{lr,micro_size} OVERRIDES", "lr optimizer=adamw",
        "find a learning rate or a shard size by measurements",
        (
            Flag("--min-lr RATE", "lr: the learning rate of the first step; 1e-7 without it", _rate),
            Flag("--max-lr RATE", "lr: the largest learning rate; 10 without it", _rate),
            Flag("--steps N", "lr: steps between them, 100 without it; micro_size: measured steps of a turn, about two "
                 "seconds without it", whole(1, 100_000)),
            Flag("--rounds N", "micro_size: turns of each size; 1 without it", whole(1, 1_000)),
            _JSON,
            Flag("--out FOLDER", "write the results into this new folder: a JSON file, and the curve of lr as PNG"),
        ), None, words=("lr", "micro_size"), composes=True, combines=True),
    "resume": Verb(
        "running", "RUN [strategy=... stop_at_step=... and other placement; epochs=... to train longer]",
        "RUN strategy=mirrored", "continue a run",
        (
            Flag("--new-schedule", "continue with other epochs, steps, schedule or warmup, from the same weights, "
                 "optimizer and step"),
            Flag("--give-up-reproducible", "continue a run with numerics.reproducible=true without that guarantee, on "
                 "any strategy"),
        ), (1, 1), paths=1),
    "replay": Verb(
        "running", "RUN", "RUN", "train a run again from its record, and compare it bit for bit",
        (Flag("--out FOLDER", "the folder of the replay; without it, a new one below outputs"), _JSON),
        (1, 1), paths=1, overrides=False),
    "explain": Verb(
        "looking", "KEY OVERRIDES, or errors.SECTION", "optimizer.lr",
        "print a key's value, its origin, and the effect of a change", (_JSON,), None, composes=True),
    "diff": Verb(
        "looking", "RUN RUN       (run folders or resolved.yaml files)", "RUN RUN",
        "print the differences of two runs that can matter", (_JSON,), (2, 2), paths=2, overrides=False),
    "report": Verb(
        "looking", "RUN | RUN RUN ... | SWEEP | outputs/comparisons.jsonl", "RUN",
        "write the page of one run, of several runs, of a sweep, or of all comparisons",
        (
            Flag("--out FILE", "the file to write; without it RUN/report.html, SWEEP/report.html, comparison.html or "
                 "outputs/comparisons.html"),
            Flag("--send", "write no page; send what the run's trackers have not received"),
        ), (1, math.inf), paths=math.inf, overrides=False),
    "top": Verb(
        "looking", "DIR [--then OVERRIDES]", "DIR --k 1 --then strategy=mirrored",
        "list the best runs of a sweep or folder; --then trains the best again",
        (
            Flag("--k N", "number of runs; all without it", whole(1)),
            *_ORDER,
            Flag("--then", "train the config of the best run again, with the given key=value: --then "
                 "strategy=mirrored"),
            _JSON,
        ), (1, 1), paths=1),
    "ensemble": Verb(
        "using", "DIR", "DIR --k 3", "combine the best runs into one model, and score it with its members",
        (
            Flag("--k N", "number of the best runs to combine; 3 without it", whole(1)),
            *_ORDER,
            _CHECKPOINT,
            Flag("--out FOLDER", "the folder for the model; DIR/ensemble without it"),
        ), (1, 1), paths=1, overrides=False),
    "evaluate": Verb(
        "using", "RUN|FOLDER|FILE [data=... strategy=... and other keys]", "RUN --split val",
        "score a trained model on a split, each sample once",
        (
            Flag("--split NAME", "the split to evaluate; val without it"),
            _CHECKPOINT,
            Flag("--json", "print evaluation.json instead of tables"),
        ), (1, 1), paths=1),
    "predict": Verb(
        "using", "RUN|FOLDER|FILE --out FILE.parquet|.npy|.jsonl [data=... strategy=... predict.outputs=...]",
        "RUN --out FILE.parquet", "write the model's outputs for every sample, in order",
        (
            Flag("--out FILE", "the file: .parquet, .npy (with ids in FILE.ids.npy) or .jsonl"),
            Flag("--split NAME", "the split to predict; val, or the only one, without it"),
            _CHECKPOINT,
            Flag("--overwrite", "replace an existing file, and drop the parts of another prediction"),
        ), (1, 1), paths=1),
    "export": Verb(
        "using", "RUN", "RUN --to onnx", "write the trained model into files that need no trainkit",
        (
            Flag("--to FORMAT", "the format: safetensors without it; torch_export, onnx, huggingface: into "
                 "RUN/exports/FORMAT"),
            _CHECKPOINT._replace(about="the checkpoint: last, or best; last without it. safetensors writes both"),
        ), (1, 1), paths=1, overrides=False),
    "generate": Verb(
        "using", "RUN --prompt TEXT", "RUN --prompt 'To be'", "continue a text with a trained language model",
        (
            Flag("--prompt TEXT", "the beginning of the text; a newline without it"),
            Flag("--prompts FILE", "a file with a prompt on each line, computed as one batch"),
            Flag("--max-tokens N", "tokens to add; 200 without it"),
            Flag("--temperature X", "divides the scores; 0, the most likely token, without it"),
            Flag("--top-k N", "draw from the N most likely tokens"),
            Flag("--top-p X", "draw from the most likely tokens that have this probability together"),
            Flag("--seed N", "seed of the random numbers; 0 without it"),
            _CHECKPOINT,
            Flag("--json", "print prompts and texts as JSON"),
        ), (1, 1), paths=1, overrides=False),
    "quantize": Verb(
        "using", "RUN --to FORMAT", "RUN --to int8_static",
        "write the trained model in 8 or 4 bits, and compare it",
        (
            Flag("--to FORMAT", QUANTIZED),
            Flag("--calibrate N", "int8_static: number of training samples whose activations are observed; 512 without "
                 "it", whole(1)),
            _CHECKPOINT,
        ), (1, 1), paths=1, overrides=False),
    "scale": Verb(
        "measuring", "OVERRIDES --to-replicas N, or --simulate --to-replicas N", "strategy=mirrored --to-replicas 64",
        "predict the speedup of more replicas",
        (
            Flag("--to-replicas N", "the largest number of replicas", whole(1, 10_000)),
            Flag("--simulate", "measure nothing: predict from assumptions, with spares and checkpoints"),
            Flag("--assume NAME=VALUE,...", "inputs that are not measured, such as gbit=100,price_h=2.5"),
            Flag("--seed N", "seed of the intervals; 0 without it", whole(0, 2**32 - 1)),
            Flag("--rounds N", "turns of each measurement; 2 without it", whole(1, 1_000)),
            _TURN_STEPS,
            _JSON,
            Flag("--out FOLDER", "folder of scale.json and scale.png; without it, a new one below outputs/scale"),
        ), None, composes=True, combines=True),
    "advise": Verb(
        "measuring", "[OVERRIDES]", "--devices 8 --hardware h100_sxm",
        "find the best valid way to train on some devices, by plans",
        (
            Flag("--devices N", "the largest number of devices to use; those of this machine without it", _PROCESSES),
            Flag("--hardware CHOICE", "a choice of the group hardware; this without it"),
            Flag("--for GOAL", "time, the shortest step; cost, the fewest device seconds; memory; time without it",
                 one_of("time", "cost", "memory")),
            *_DATA,
            _JSON,
        ), composes=True),
    "capabilities": Verb(
        "looking", "[STRATEGY ...]", "fsdp pipeline --json",
        "which features each strategy takes, and why it refuses the others: planned, not run",
        (_JSON,), (0, math.inf), overrides=False),
    "emit": Verb(
        "starting", f"{{{','.join(ENGINES)}}} [--hosts N] [--flags] OVERRIDES", "slurm --hosts 2 --gpus-per-host 4",
        "print the script or manifest that starts a run on an engine",
        (
            Flag("--hosts N", "number of equal hosts; 1 without it", whole(1)),
            Flag("--gpus-per-host N", "processes per host, with one GPU each", whole(1)),
            Flag("--processes-per-host N", "processes per host without GPUs; 1 if neither is given", whole(1)),
            Flag("--setup COMMAND", "torchrun, slurm, skypilot: a shell command to run first on each host", _command),
            Flag("--time TIME", "slurm, kubernetes, vertex: end after [DAYS-]HH:MM:SS", _time),
            Flag("--image IMAGE", "kubernetes, vertex, skypilot: the container image with trainkit", _word),
            Flag("--shared PLACE", "the storage of runs of all hosts: a claim (kubernetes), SERVER:/PATH of NFS "
                 "(vertex), a volume (skypilot)", _word),
            Flag("--names HOST,HOST", "tf_config, spec, mpirun: the names of the hosts, separated by commas", _word),
            Flag("--head HOST", "torchrun: the host of the rendezvous", _word),
            Flag("--port N", "torchrun: the port of the rendezvous, 29400; tf_config, spec: the first port of each "
                 "host, 2222", whole(1, 65_535)),
            Flag("--restarts N", "torchrun: number of restarts of all processes after one fails", whole(0)),
            Flag("--min-hosts N", "torchrun: number of hosts with which to continue after others are lost", whole(1)),
            Flag("--partition NAME", "slurm: the partition", _word),
            Flag("--account NAME", "slurm: the account that is charged", _word),
            Flag("--cpus-per-process N", "slurm: cores of each process", whole(1)),
            Flag("--namespace NAME", "kubernetes: the namespace", _word),
            Flag("--machine TYPE", "vertex: the machine type, n1-standard-8", _word),
            Flag("--accelerator TYPE", "vertex, skypilot: the GPU, NVIDIA_L4 or A100", _word),
        ), None, words=ENGINES, composes=True, combines=True),
    "init": Verb(
        "starting", "NAME", "my_package", "write a package of your own that can train at once",
        arguments=(1, 1), overrides=False),
    "schema": Verb(
        "looking", "[config | NAME]", "config",
        "print the JSON schema of your YAML files, for editors, or of a JSON output",
        arguments=(0, 1), overrides=False),
    "watch": Verb(
        "looking", "[DIR]", "outputs", "show all runs below a folder, live", (_JSON,), (0, 1), paths=1,
        overrides=False),
    "ls": Verb(
        "looking", "[GROUP [CHOICE] | RUNS] | --model OVERRIDES", "model",
        "list groups, choices and recipes; the runs of a folder; the layers of a model",
        (
            Flag("--model", "the layers of the model: output, parameters, FLOPs of each; takes key=value"),
            _JSON,
        ), (0, 2), paths=1),
}  # fmt: skip
"""In the order of the help."""
