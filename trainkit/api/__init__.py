"""The Python API of trainkit: the same code path as the command line, also for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainkit.cluster.local import launch_environment_of
from trainkit.config.composition import Composition
from trainkit.config.grammar import key_of
from trainkit.config.interface import called_from
from trainkit.config.schema import RunConfig
from trainkit.config.targets.allowed import allow_packages
from trainkit.config.yaml_files import with_config_dirs
from trainkit.errors import ConfigError, Problem, refuse

if TYPE_CHECKING:
    from torch import nn

    from trainkit.api.calls import TrainingResult
    from trainkit.api.own_loop import Session
    from trainkit.run.planning.plan import RunPlan
    from trainkit.run.session.loop_loss import LossFunction

__all__ = ["compose", "generate", "load", "session", "train"]


@called_from("python")
def compose(
    overrides: Sequence[str] = (), *, config_dirs: Sequence[str | Path] = (), packages: Sequence[str] = ()
) -> Composition:
    """Compose a run and check its names, choices and keys; torch is not imported.

    Args:
        overrides: arguments as on the command line, `["model=mlp", "optimizer.lr=0.1"]`.
        config_dirs: folders of your own YAMLs; they come first on the search path.
        packages: your own packages that `_target_` may name.

    Returns:
        The composition: `.cfg` is the run, `.notes` are remarks about it.

    Raises:
        ConfigError: every problem found.

    Example:
        >>> compose(["recipe=null", "epochs=3"]).cfg.epochs
        3
    """
    from trainkit.config.check import checked_names  # noqa: PLC0415 - Hydra only where one composes
    from trainkit.config.compose import compose as compose_run  # noqa: PLC0415

    return checked_names(compose_run(overrides, config_dirs=config_dirs, packages=packages))


@called_from("python")
def train(
    run: Composition | RunConfig | Sequence[str] = (),
    *,
    run_dir: str | Path | None = None,
    model: object = None,
    data: object = None,
    objective: object = None,
    optimizer: object = None,
    write_source: bool = False,
    config_dirs: Sequence[str | Path] = (),
    packages: Sequence[str] = (),
    **keys: Any,
) -> TrainingResult:
    """Check a run and train it.

    Args:
        run: arguments as on the command line, the result of `compose`, or a `RunConfig` made by hand, in which a group
            that is left out is that of `recipe=null`, and callbacks and loggers are those that it names.
        run_dir: the run folder; None: a new one below outputs, or `hydra.run.dir` if the composition sets it.
        model: a `torch.nn.Module`, which stays as it is; a class or function that makes one, with its settings in
            `functools.partial`; or the name of a choice. With a model or data of your own, no recipe applies unless
            `run` names one.
        data: a dataset, a pair (training, validation), a mapping from split to dataset, a class or function, or the
            name of a choice.
        objective: an `Objective`, a class or function that makes one, or the name of a choice.
        optimizer: a `torch.optim.Optimizer` with one group of parameters, whose class and settings are used; its class
            in `functools.partial`; the name of a choice; or keys, `{"lr": 0.03}`. Model and objective take keys, too.
        write_source: write the source of given classes that this session defines into the run's folder, so that a
            strategy with several processes can import them.
        config_dirs: as in `compose`.
        packages: as in `compose`; the packages of given classes need no name here.
        keys: keys of the config and choices, `steps=100, strategy="mirrored", batch={"global_size": 32}`.

    Returns:
        The content of `result.json`, with `.metrics`, `.best`, `.folder` and `.model()`.

    Raises:
        ConfigError: every problem of the config; nothing was written.
        TrainkitError: the training failed; the message names the place and the cause, and the last checkpoint is kept.

    Example:
        result = train(model=Net(), data=(train_set, val_set), objective="classification", optimizer="adamw", steps=100)
        result.metrics["val/accuracy"], result.model()
    """
    from trainkit.api import calls  # noqa: PLC0415 - imports torch
    from trainkit.config.check import checked  # noqa: PLC0415 - imports the targets, and torch with them
    from trainkit.run.runner import train_composition  # noqa: PLC0415 - imports torch

    values = {"model": model, "data": data, "objective": objective, "optimizer": optimizer}
    folder = calls.run_folder(run_dir)
    composition, objects = calls.composed(
        run, values, keys, write_source=write_source, config_dirs=config_dirs, packages=packages
    )
    if composition.is_sweep:
        raise ConfigError([_sweep_problem(composition)])
    with calls.registered(objects), allow_packages(composition.packages), with_config_dirs(composition.config_dirs):
        composition = checked(composition)
        calls.refuse_processes(objects, composition.cfg, launch_environment_of(composition.cfg))
        result = train_composition(composition, run_dir=folder, kept_in=objects.kept_in, choose_workers=choose_workers)
        return calls.TrainingResult(result, objects=objects, packages=composition.packages)


@called_from("python")
def session(
    run: Composition | RunConfig | Sequence[str] = (),
    *,
    run_dir: str | Path | None = None,
    model: object = None,
    data: object = None,
    objective: object = None,
    optimizer: object = None,
    loss: LossFunction | None = None,
    terms: Sequence[str] = (),
    config_dirs: Sequence[str | Path] = (),
    packages: Sequence[str] = (),
    **keys: Any,
) -> Session:
    """Return a session: the training of a config, whose loop is the caller's own.

    For a strategy of several processes, the script itself is started once per process (torchrun, SLURM, MPI), and each
    builds the objects that it is given.

    Args:
        run: as in `train`.
        run_dir: as in `train`.
        model: as in `train`.
        data: as in `train`.
        objective: as in `train`; it computes evaluations, and steps without a loss of their own.
        optimizer: as in `train`.
        loss: a function of model and batch, instead of an objective, for steps and evaluations. It returns the mean
            over the samples of the batch; see `Session.step`.
        terms: names of the parts of a loss, where a function returns a mapping.
        config_dirs: as in `train`.
        packages: as in `train`.
        keys: as in `train`.

    Returns:
        The session, a context manager; inside, it has the model, the batches and the calls of a loop.

    Raises:
        ConfigError: every problem of the config; nothing was written.

    Example:
        with session(["recipe=digits"]) as training:
            for shards in training.batches():
                training.step()
    """
    from trainkit.api import calls, own_loop  # noqa: PLC0415 - imports torch
    from trainkit.config.check import checked  # noqa: PLC0415 - imports the targets, and torch with them
    from trainkit.run.session.loop_loss import FunctionLoss  # noqa: PLC0415 - imports torch

    if loss is not None and objective is not None:
        raise ConfigError([Problem(key="objective", rule="is given together with loss. Give one of the two.")])
    objective = objective if loss is None else FunctionLoss(loss, terms)
    values = {"model": model, "data": data, "objective": objective, "optimizer": optimizer}
    folder = calls.run_folder(run_dir)
    composition, objects = calls.composed(run, values, keys, config_dirs=config_dirs, packages=packages)
    rule = "is for the command line: a session runs no Hydra job."
    hydra = {key_of(item) for item in composition.hydra_overrides} - {"hydra.run.dir"}
    problems = [Problem(key=key, rule=rule) for key in sorted(hydra)]
    if composition.is_sweep:
        problems.append(Problem(key="cv.folds", rule="starts a run per fold. For one fold, give cv.fold=0."))
    refuse(problems)
    with calls.registered(objects), allow_packages(composition.packages), with_config_dirs(composition.config_dirs):
        composition = checked(composition)
        launch = launch_environment_of(composition.cfg)
    return own_loop.Session(composition, objects=objects, launch=launch, run_dir=folder, terms=terms)


def choose_workers(plan: RunPlan) -> tuple[int, str]:
    """Measure how many data loading processes a run needs."""
    from trainkit.measuring.searches import workers_of_plan  # noqa: PLC0415 - for loader.num_workers=auto only

    return workers_of_plan(plan)


@called_from("python")
def load(path: str | Path, *, checkpoint: Literal["best", "last"] = "last", packages: Sequence[str] = ()) -> nn.Module:
    """Load a trained model, on the CPU and in evaluation mode.

    Args:
        path: a run folder, a checkpoint of a run, the folder `model` of a run or its file, or a folder that `trainkit
            ensemble` wrote.
        checkpoint: which checkpoint of a run folder, or which weights of the folder `model`.
        packages: your own packages that the model's classes may come from.

    Raises:
        ConfigError: there is no model, or a config must not name its classes.
        CheckpointError: the weights are damaged, or belong to another model.

    Example:
        model = load("outputs/sweeps/rates/ensemble")
        model(images).argmax(dim=-1)
    """
    from trainkit.trained.model import load_model  # noqa: PLC0415 - imports torch

    return load_model(Path(path).expanduser(), checkpoint=checkpoint, packages=packages)


@called_from("python")
def generate(
    run: str | Path,
    prompts: Sequence[str],
    *,
    max_tokens: int = 200,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    checkpoint: Literal["best", "last"] = "last",
    packages: Sequence[str] = (),
) -> list[str]:
    """Continue texts with the language model of a run, on the first GPU or the CPU.

    Args:
        run: a run folder, whose data has `encode` and `decode`.
        prompts: the beginnings of the texts, each with one token of the vocabulary or more.
        max_tokens: most tokens to add to each.
        temperature: divides the scores; 0 chooses the most likely token. None: 1 with `top_k` or `top_p`, else 0.
        top_k: draw only from the k most likely tokens; None: from all.
        top_p: draw only from the most likely tokens that have this probability together; None: from all.
        seed: seed of the random numbers; None: 0. A text does not depend on the other prompts.
        checkpoint: which checkpoint of the run.
        packages: your own packages that the classes of model and data may come from.

    Returns:
        The continuation of each prompt, without the prompt.

    Raises:
        ConfigError: a setting is out of its range or has no effect, there is no such run, its data has no vocabulary,
            or a prompt has no token of it.
        CheckpointError: the weights are damaged, or belong to another model.
        TrainingError: the model's outputs are not scores of next tokens.

    Example:
        generate("outputs/shakespeare", ["ROMEO:", "JULIET:"], max_tokens=100, temperature=0.8, top_k=20)
    """
    from trainkit.models.sampling import Sampling, broken_settings, temperature_of  # noqa: PLC0415 - for this only
    from trainkit.trained.generate import Writer  # noqa: PLC0415 - imports torch

    settings = {"max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    chosen = {name: value for name, value in settings.items() if value is not None}
    refuse([Problem(key=name, value=chosen[name], rule=rule) for name, rule in broken_settings(chosen)])
    writer = Writer.of(Path(run).expanduser(), checkpoint=checkpoint, packages=packages)
    sampling = Sampling(temperature=temperature_of(chosen), top_k=top_k, top_p=top_p)
    return writer.write(prompts, sampling=sampling, max_tokens=max_tokens, seed=seed or 0)


def _sweep_problem(composition: Composition) -> Problem:
    """Return the problem of a composition that `train` cannot run in-process: a sweep, or one for a Hydra launcher."""
    if composition.asks_for_folds:
        rule = "starts a run per fold, which only `trainkit cv.folds=...` does. For one fold, give cv.fold=0."
        return composition.problem("cv.folds", rule, value=composition.values["cv"]["folds"])
    launcher = composition.hydra_choices.get("hydra/launcher")
    rule = f"hands runs to the launcher {launcher}, which only the command line does. Here, give hydra.mode=RUN."
    return Problem(key="cluster", value=composition.choices.get("cluster"), rule=rule)
