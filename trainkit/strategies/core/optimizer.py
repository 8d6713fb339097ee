"""Step a torch optimizer at the learning rate of each update, by calling its kernel directly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainkit.adapters.average import AfterStep
from trainkit.errors import ConfigError, Problem, TrainingError
from trainkit.strategies.step_values import NamedOptimizer
from trainkit.strategies.tensors.layouts import in_layout


class Updater(Protocol):
    """Updates the parameters of a replica."""

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """All optimizers of the updater."""
        ...

    def step(self, grads: Sequence[Tensor | None], lr_factor: float) -> None:
        """Update the parameters, as `OptimizerStepper.step` does."""
        ...

    def state(self, params: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Return the state, as `optimizer_state` does; no copies."""
        ...

    def restore(self, params: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
        """Replace the state by that of a checkpoint."""
        ...


class OptimizerStepper:
    """Steps an optimizer with given gradients at a given learning rate.

    The fused kernels of Adam, AdamW and SGD without hooks are called directly: the wrappers of `Optimizer.step`
    (profiler ranges, hook dictionaries, grouping by device) cost more than the kernel for a small model. The kernel is
    the same, and so are the bits.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> None:
        self.optimizer = optimizer
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._place = {id(param): place for place, param in enumerate(params)}
        self._params = list(params)
        self._strides = [param.stride() for param in params]
        self._initial = {param: _copied(slots) for param, slots in optimizer.state.items()}
        """Slots created by the constructor of the optimizer; most optimizers create them in the first step."""
        self._kernels: list[Callable[[list[Tensor], float], None]] | None = None
        self._places: list[list[int]] = []
        self._counters: list[tuple[Tensor, Tensor]] = []
        self._rates: list[float] = []
        self._settings: list[dict[str, Any]] = []
        """The settings of each group at the last step of torch's optimizer."""

    def step(self, grads: Sequence[Tensor | None], lr_factor: float) -> None:
        """Update the parameters.

        Args:
            grads: one per parameter, in the order of `params`; None skips the parameter, as torch does.
            lr_factor: factor of the learning rate of every group.
        """
        grads, none_missing = self._in_layout(grads)
        self._refuse_other_rates()
        if self._kernels is not None and none_missing and not self.has_changed and not _hooks(self.optimizer):
            for counter, one in self._counters:
                counter.add_(one)
            for kernel, places, base_lr in zip(self._kernels, self._places, self._rates, strict=True):
                kernel([grads[place] for place in places], base_lr * lr_factor)  # type: ignore[misc]
            return
        for group, base_lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base_lr * lr_factor
        for param, grad in zip(self._params, grads, strict=True):
            param.grad = grad
        if any(grad is not None and grad.is_sparse for grad in grads):
            self._unfuse()
        self.optimizer.step()
        for param in self._params:
            param.grad = None
        self._find_kernels(grads)
        self._settings = _settings_of(self.optimizer)

    @property
    def has_changed(self) -> bool:
        """Whether code of the run has changed settings of a group since the last step of torch's optimizer: kernels
        and graphs hold those of that step.
        """
        return self._settings != _settings_of(self.optimizer)

    def refuse_changes(self) -> None:
        """Refuse changed settings and hooks of the optimizer, for graphs that hold the settings.

        Raises:
            TrainingError: there are some, or another rate.
        """
        self._refuse_other_rates()
        if self.has_changed or self.has_other_hooks:
            raise TrainingError(
                "compile.mode=step: settings or hooks of the optimizer have changed, and a graph holds those of its "
                "first step. Change them before it, or use compile.mode=default."
            )

    def _refuse_other_rates(self) -> None:
        """Refuse a rate that code of the run has set, because the schedule sets that of each step.

        Raises:
            TrainingError: names the rate.
        """
        for place, (before, group) in enumerate(zip(self._settings, self.optimizer.param_groups, strict=False)):
            if group["lr"] is not before["lr"] and group["lr"] != before["lr"]:
                raise TrainingError(
                    f"code of this run has set the learning rate of group {place} of the optimizer to "
                    f"{float(group['lr']):g}, and the schedule sets that of each step. Use optimizer.lr, schedule, or "
                    "lr of the group in optimizer.groups."
                )

    def _in_layout(self, grads: Sequence[Tensor | None]) -> tuple[list[Tensor | None], bool]:
        """Return gradients with the strides of their parameters, and whether each parameter has one.

        Fused kernels pair elements by memory order.
        """
        strides = [None if grad is None or grad.is_sparse else grad.stride() for grad in grads]
        found = list(grads)
        if strides == self._strides:
            return found, True
        for place, (grad, own, wanted) in enumerate(zip(grads, strides, self._strides, strict=True)):
            if grad is not None and own is not None and own != wanted:
                found[place] = in_layout(grad, wanted)
        return found, all(grad is not None for grad in grads)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer]:
        """The optimizer."""
        return (self.optimizer,)

    def state(self, params: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Return the state, as `optimizer_state` does; no copies."""
        return optimizer_state(self.optimizer, params)

    def restore(self, params: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
        """Replace the optimizer's state by that of a checkpoint, or of a new optimizer if it has none."""
        restore_optimizer_state(self.optimizer, params, tensors, initial=self._initial)
        self.forget_kernels()

    def forget_kernels(self) -> None:
        """Look up the kernels again in the next step, because slots were replaced or updated by other code."""
        self._kernels = None

    @property
    def has_other_hooks(self) -> bool:
        """Whether hooks are registered on the optimizer besides those of averages."""
        return not all(isinstance(hook, AfterStep) for hook in _hooks(self.optimizer))

    def after_update(self, params: Sequence[Tensor]) -> None:
        """Bring the averages of parameters up to date, after an update that `step` has not made."""
        for hook in self.optimizer._optimizer_step_post_hooks.values():  # noqa: SLF001 - has no public name
            if isinstance(hook, AfterStep):
                hook.update(self.optimizer, params)

    def _unfuse(self) -> None:
        """Use torch's plain loop for groups with a sparse gradient: fused kernels do not support it."""
        for group in self.optimizer.param_groups:
            if group.get("fused") and any(p.grad is not None and p.grad.is_sparse for p in group["params"]):
                group["fused"] = False

    def _find_kernels(self, grads: Sequence[Tensor | None]) -> None:
        """Find the kernels that can be called directly, once the optimizer has created its state."""
        make, groups = _kernel_maker(type(self.optimizer)), self.optimizer.param_groups
        if make is None or any(grad is None for grad in grads) or not all(map(_has_plain_kernel, groups)):
            return
        states = self.optimizer.state
        if not all(_slots_agree(param, states[param]) for param in self._params):
            for group in groups:
                group["fused"] = False  # torch's plain loop takes slots of any strides
            return
        if _hooks(self.optimizer):
            return
        counters = joined_counts([states[param] for param in self._params if "step" in states[param]])
        self._counters = [(one, torch.ones_like(one)) for one in counters]  # the number 1 costs 7 us more than a tensor
        # a fused kernel works on one device only
        parts = [
            (group, base_lr, members)
            for group, base_lr in zip(groups, self.base_lrs, strict=True)
            for members in _by_device(group["params"])
        ]
        self._rates = [base_lr for _, base_lr, _ in parts]
        self._places = [[self._place[id(param)] for param in members] for _, _, members in parts]
        self._kernels = [make(group, members, [states[p] for p in members]) for group, _, members in parts]


@dataclass(frozen=True, kw_only=True)
class _Member:
    named: NamedOptimizer
    stepper: OptimizerStepper
    params: Mapping[str, nn.Parameter]
    """The masters that this optimizer updates, by canonical name."""


class NamedSteppers:
    """Steps several optimizers as one.

    Args:
        members: the optimizers.
        names: the parameters of the gradients that `step` gets, in their order.
    """

    def __init__(self, members: Sequence[_Member], names: Sequence[str]) -> None:
        self._members, self.names = tuple(members), tuple(names)
        places = {name: place for place, name in enumerate(names)}
        self._places = [[places[name] for name in one.params] for one in self._members]
        self._factors = [1.0] * len(self._members)

    @classmethod
    def of(cls, optimizers: Sequence[NamedOptimizer], masters: Mapping[str, nn.Parameter]) -> NamedSteppers:
        """Build the optimizers over the parameters of a replica."""
        members = []
        for named in optimizers:
            params = {name: param for name, param in masters.items() if name in named.params}
            stepper = OptimizerStepper(named.make(params), list(params.values()))
            members.append(_Member(named=named, stepper=stepper, params=params))
        return cls(members, list(masters))

    def only(self, name: str) -> NamedSteppers:
        """Return the stepper of one optimizer, for gradients of only its parameters."""
        (member,) = (one for one in self._members if one.named.name == name)
        return NamedSteppers([member], list(member.params))

    def begin_step(self, step: int) -> None:
        """Set each optimizer's learning rate to that of a step."""
        self._factors = [one.named.factor(step) for one in self._members]

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """All optimizers, in the order of the config."""
        return tuple(one.stepper.optimizer for one in self._members)

    def step(self, grads: Sequence[Tensor | None], lr_factor: float) -> None:
        """Update the parameters.

        Args:
            grads: gradients, one per parameter, in the order of `names`.
            lr_factor: factor of the learning rate of every optimizer.
        """
        for one, places, factor in zip(self._members, self._places, self._factors, strict=True):
            one.stepper.step([grads[place] for place in places], lr_factor * factor)

    def state(self, params: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:  # noqa: ARG002 - they belong to this class
        """Return the state of all optimizers; no parameter belongs to two of them."""
        return {key: tensor for one in self._members for key, tensor in one.stepper.state(one.params).items()}

    def restore(self, params: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:  # noqa: ARG002
        """Replace the state by that of a checkpoint."""
        for one in self._members:
            one.stepper.restore(one.params, tensors)


def _has_plain_kernel(group: Mapping[str, Any]) -> bool:
    return bool(group["fused"]) and not group.get("capturable") and not group["differentiable"]


def _slots_agree(param: Tensor, slots: Mapping[str, Any]) -> bool:
    """Return whether every slot with the shape of the parameter has its strides."""
    found = (slot for slot in slots.values() if isinstance(slot, Tensor) and slot.shape == param.shape)
    return all(slot.stride() == param.stride() for slot in found)


def _by_device(params: Sequence[Tensor]) -> list[list[Tensor]]:
    found: dict[torch.device, list[Tensor]] = {}
    for param in params:
        found.setdefault(param.device, []).append(param)
    return list(found.values())


def joined_counts(states: Sequence[dict[str, Tensor]]) -> list[Tensor]:
    """Return Adam's step counts as views of one tensor per device, so that one addition advances all of them."""
    by_device: dict[torch.device, list[dict[str, Tensor]]] = {}
    for state in states:
        by_device.setdefault(state["step"].device, []).append(state)
    joined = []
    for members in by_device.values():
        counts = torch.stack([state["step"] for state in members])
        for state, count in zip(members, counts.unbind(), strict=True):
            state["step"] = count
        joined.append(counts)
    return joined


def _settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each group, and its number of parameters."""
    return [{**group, "params": len(group["params"])} for group in optimizer.param_groups]


def _hooks(optimizer: torch.optim.Optimizer) -> list[object]:
    from torch.optim import optimizer as module  # noqa: PLC0415 - torch.optim imports torch._dynamo: only when stepping

    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)  # noqa: SLF001
    shared = (module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks)  # noqa: SLF001
    return [hooks[key] for hooks in (*own, *shared) for key in hooks]


def _adam_kernel(
    group: Mapping[str, Any], params: list[Tensor], states: list[dict[str, Tensor]], *, decoupled: bool
) -> Callable[[list[Tensor], float], None]:
    kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
    averages = [state["exp_avg"] for state in states]
    squares = [state["exp_avg_sq"] for state in states]
    largest = [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else []
    steps = [state["step"] for state in states]
    beta1, beta2 = (float(beta) for beta in group["betas"])
    settings = {
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": group["weight_decay"],
        "eps": group["eps"],
        "amsgrad": group["amsgrad"],
        "maximize": group["maximize"],
    }

    def step(grads: list[Tensor], lr: float) -> None:
        kernel(params, grads, averages, squares, largest, steps, lr=lr, **settings)

    return step


def _sgd_kernel(
    group: Mapping[str, Any], params: list[Tensor], states: list[dict[str, Tensor]]
) -> Callable[[list[Tensor], float], None]:
    momenta = [state["momentum_buffer"] for state in states] if group["momentum"] else []
    settings = {name: group[name] for name in ("weight_decay", "momentum", "dampening", "nesterov", "maximize")}

    def step(grads: list[Tensor], lr: float) -> None:
        torch._fused_sgd_(params, grads, momenta, lr=lr, is_first_step=False, **settings)

    return step


def _kernel_maker(kind: type) -> Callable[..., Callable[[list[Tensor], float], None]] | None:
    """Return the factory of the direct kernel for exactly this class; a subclass may behave differently."""
    if kind is torch.optim.AdamW:
        return partial(_adam_kernel, decoupled=True)
    if kind is torch.optim.Adam:
        return lambda group, *rest: _adam_kernel(group, *rest, decoupled=bool(group.get("decoupled_weight_decay")))
    return _sgd_kernel if kind is torch.optim.SGD else None


def optimizer_state(optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the optimizer's state as `optimizer/<slot>/<name>` -> tensor, numbers as () tensors; no copies.

    Raises:
        ConfigError: it is neither of these.
    """
    found = {}
    for name, param in params.items():
        for slot, value in optimizer.state.get(param, {}).items():
            if value is not None:
                if not isinstance(value, Tensor | bool | int | float):
                    rule = f"keeps {slot} of {name} as a {type(value).__name__}. Checkpoints hold tensors and numbers."
                    raise ConfigError([Problem(key="optimizer", value=type(optimizer).__name__, rule=rule)])
                kept = torch.as_tensor(value)
                found[f"optimizer/{slot}/{name}"] = kept.to_dense() if kept.is_sparse else kept
    return found


def restore_optimizer_state(
    optimizer: torch.optim.Optimizer,
    params: Mapping[str, nn.Parameter],
    tensors: Mapping[str, Tensor],
    *,
    initial: Mapping[Tensor, Mapping[str, Any]] | None = None,
) -> None:
    """Give the optimizer the state that `optimizer_state` saved, every slot in the strides of its parameter.

    Group settings (rates, decay) stay those of the config: only what the optimizer has accumulated is restored.

    Args:
        optimizer: the optimizer whose state is replaced.
        params: the parameters by canonical name.
        tensors: a checkpoint; tensors of other parameters are not read.
        initial: the slots of parameters without saved ones; None: their current slots.
    """
    known: Mapping[Tensor, Mapping[str, Any]] = optimizer.state if initial is None else initial
    fresh = {name: _copied(known[param]) for name, param in params.items() if param in known}
    saved: dict[str, dict[str, Tensor]] = {}
    for key in tensors:
        kind, _, rest = key.partition("/")
        slot, _, name = rest.partition("/")
        if kind == "optimizer" and name in params and "@" not in slot:  # `NAME@COPY` is the slot of another copy
            saved.setdefault(name, {})[slot] = tensors[key]
    slots = {**fresh, **saved}
    state = optimizer.state_dict()
    names = {id(param): name for name, param in params.items()}
    order = [names[id(param)] for group in optimizer.param_groups for param in group["params"]]
    state["state"] = {place: slots[name] for place, name in enumerate(order) if name in slots}
    optimizer.load_state_dict(state)
    for param, own in optimizer.state.items():  # load_state_dict casts to the dtype of the parameter, not to its layout
        for slot, value in own.items():
            kept = slots[names[id(param)]].get(slot)
            if slot != "step" and isinstance(kept, Tensor) and isinstance(value, Tensor) and kept.dtype != value.dtype:
                value = own[slot] = kept.to(value.device)  # noqa: PLW2901
            if isinstance(value, Tensor) and value.shape == param.shape:
                own[slot] = in_layout(value, param.stride())


def _copied(slots: Mapping[str, Any]) -> dict[str, Any]:
    return {slot: value.clone() if isinstance(value, Tensor) else value for slot, value in slots.items()}
