"""Step a torch optimizer at the learning rate of each update, by calling its kernel directly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import optimizer as module

from trainkit.adapters.average import SLOTS, put_back
from trainkit.errors import ConfigError, Problem, TrainingError
from trainkit.strategies.base import NamedOptimizer
from trainkit.strategies.tensors.layouts import in_layout


class _Kernel(NamedTuple):
    """The fused kernel of a group on a device, and its arguments."""

    function: Callable[..., object]
    params: list[Tensor]
    indices: list[int]
    """The indices of the gradients."""
    slots: list[list[Tensor]]
    settings: dict[str, Any]
    base_lr: float
    counter: tuple[Tensor, Tensor] | None
    """The counts of updates, and as many ones."""


class OptimizerStepper:
    """Steps an optimizer with given gradients at a given learning rate.

    The fused kernels of Adam, AdamW and SGD without hooks are called directly: the wrappers of `Optimizer.step`
    (profiler ranges, hook dictionaries, grouping by device) cost more than the kernel for a small model. The kernel is
    the same, and so are the bits.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> None:
        self.optimizer = optimizer
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._index_of = {id(param): index for index, param in enumerate(params)}
        self._params = list(params)
        self._strides = [param.stride() for param in params]
        self._initial = {param: _copied(slots) for param, slots in optimizer.state.items()}
        """Slots created by the constructor of the optimizer; most optimizers create them in the first step."""
        self._kernels: list[_Kernel] | None = None
        self._settings: list[dict[str, Any]] = []
        """The settings of each group at the last step of torch's optimizer, which the kernels hold."""

    def step(self, grads: Sequence[Tensor | None], lr_factor: float) -> None:
        """Update the parameters.

        Args:
            grads: one per parameter, in the order of `params`; None skips the parameter, as torch does.
            lr_factor: factor of the learning rate of every group.
        """
        grads, none_missing = self._in_layout(grads)
        are_same = self._settings == self._settings_now()
        if not are_same:
            self._refuse_other_rates()
        if self._kernels is not None and none_missing and are_same and not self._hooks():
            for kernel in self._kernels:
                if kernel.counter is not None:
                    kernel.counter[0].add_(kernel.counter[1])
            for kernel in self._kernels:
                chosen = list(map(grads.__getitem__, kernel.indices))
                kernel.function(kernel.params, chosen, *kernel.slots, lr=kernel.base_lr * lr_factor, **kernel.settings)
            return
        for group, base_lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base_lr * lr_factor
        for param, grad in zip(self._params, grads, strict=True):
            param.grad = grad
        for group in self.optimizer.param_groups:  # fused kernels support no sparse gradient
            if group.get("fused") and any(p.grad is not None and p.grad.is_sparse for p in group["params"]):
                group["fused"] = False
        try:
            self.optimizer.step()
        finally:
            put_back(self.optimizer)
            for param in self._params:
                param.grad = None
        self._find_kernels(grads)
        self._settings = self._settings_now()

    def _refuse_other_rates(self) -> None:
        """Refuse a rate that code of the run has set, because the schedule sets that of each step.

        Raises:
            TrainingError: names the rate.
        """
        for index, (before, group) in enumerate(zip(self._settings, self.optimizer.param_groups, strict=False)):
            if group["lr"] is not before["lr"] and group["lr"] != before["lr"]:
                raise TrainingError(
                    f"code of this run has set the learning rate of group {index} of the optimizer to "
                    f"{float(group['lr']):g}, and the schedule sets that of each step. Use optimizer.lr, schedule, or "
                    "lr of the group in optimizer.groups."
                )

    def _in_layout(self, grads: Sequence[Tensor | None]) -> tuple[list[Tensor | None], bool]:
        """Return gradients with the strides of their parameters, and whether each parameter has one.

        Fused kernels pair elements by memory order.
        """
        strides = [None if grad is None or grad.is_sparse else grad.stride() for grad in grads]
        laid_out = list(grads)
        if strides == self._strides:
            return laid_out, True
        for index, (grad, actual, expected) in enumerate(zip(grads, strides, self._strides, strict=True)):
            if grad is not None and actual is not None and actual != expected:
                laid_out[index] = in_layout(grad, expected)
        return laid_out, all(grad is not None for grad in grads)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizer; of several, all."""
        return (self.optimizer,)

    def state(self, params: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Return the state, as `optimizer_state` does; no copies."""
        return optimizer_state(self.optimizer, params)

    def restore(self, params: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
        """Replace the optimizer's state by that of a checkpoint, or of a new optimizer if it has none."""
        restore_optimizer_state(self.optimizer, params, tensors, initial=self._initial)
        self._kernels = None

    def _settings_now(self) -> list[dict[str, Any]]:
        """Return the settings of each group, and its number of parameters."""
        return [{**group, "params": len(group["params"])} for group in self.optimizer.param_groups]

    def _hooks(self) -> bool:
        """Return whether hooks are registered on the optimizer, or on all of them."""
        hooks = self.optimizer._optimizer_step_pre_hooks or self.optimizer._optimizer_step_post_hooks  # noqa: SLF001
        return bool(hooks or module._global_optimizer_pre_hooks or module._global_optimizer_post_hooks)  # noqa: SLF001

    def _find_kernels(self, grads: Sequence[Tensor | None]) -> None:
        """Find the kernels that can be called directly, once the optimizer has created its state."""
        groups, states = self.optimizer.param_groups, self.optimizer.state
        self._kernels = None
        if (
            type(self.optimizer) not in _FUSED
            or any(grad is None for grad in grads)
            or any(not group["fused"] or group.get("capturable") or group["differentiable"] for group in groups)
        ):
            return
        if not all(_slots_agree(param, states[param]) for param in self._params):
            for group in groups:
                group["fused"] = False  # torch's plain loop takes slots of any strides
            return
        if self._hooks():
            return
        self._kernels = [
            self._kernel(group, base_lr, [param for param in group["params"] if param.device == device])
            for group, base_lr in zip(groups, self.base_lrs, strict=True)
            for device in dict.fromkeys(param.device for param in group["params"])  # a kernel works on one device only
        ]

    def _kernel(self, group: Mapping[str, Any], base_lr: float, params: list[Tensor]) -> _Kernel:
        """Return the kernel of parameters of a group on one device, with the arguments that torch gives it."""
        states = [self.optimizer.state[param] for param in params]

        def of_each(slot: str) -> list[Tensor]:
            return [state[slot] for state in states]

        names = ("momentum", "dampening", "nesterov") if "momentum" in group else ("eps", "amsgrad")
        settings = {name: group[name] for name in ("weight_decay", "maximize", *names)}
        if "momentum" in group:
            function: Callable[..., object] = partial(torch._fused_sgd_, is_first_step=False)
            slots, counter = [of_each("momentum_buffer") if group["momentum"] else []], None
        else:
            decoupled = type(self.optimizer) is torch.optim.AdamW or group.get("decoupled_weight_decay")
            function = torch._fused_adamw_ if decoupled else torch._fused_adam_
            settings["beta1"], settings["beta2"] = (float(beta) for beta in group["betas"])
            # views of one tensor, so that one addition advances all; the number 1 costs 7 us more than a tensor
            counts = torch.stack(of_each("step"))
            counter = counts, torch.ones_like(counts)
            for state, count in zip(states, counts.unbind(), strict=True):
                state["step"] = count
            largest = of_each("max_exp_avg_sq") if group["amsgrad"] else []
            slots = [of_each("exp_avg"), of_each("exp_avg_sq"), largest, of_each("step")]
        return _Kernel(
            function, params, [self._index_of[id(param)] for param in params], slots, settings, base_lr, counter
        )


_FUSED: Final = frozenset({torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD})
"""Classes whose kernels are called directly; a subclass may behave differently."""


@dataclass(frozen=True, kw_only=True)
class _Member:
    named: NamedOptimizer
    stepper: OptimizerStepper
    params: Mapping[str, nn.Parameter]
    """The masters that this optimizer updates, by canonical name."""


class NamedSteppers(OptimizerStepper):
    """Steps several optimizers as one.

    Args:
        members: the optimizers.
        names: the parameters of the gradients that `step` gets, in their order.
    """

    def __init__(self, members: Sequence[_Member], names: Sequence[str]) -> None:
        self._members, self.names = tuple(members), tuple(names)
        index_of = {name: index for index, name in enumerate(names)}
        self._indices = [[index_of[name] for name in member.params] for member in self._members]
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
        (member,) = (member for member in self._members if member.named.name == name)
        return NamedSteppers([member], list(member.params))

    def begin_step(self, step: int) -> None:
        """Set each optimizer's learning rate to that of a step."""
        self._factors = [member.named.factor(step) for member in self._members]

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """All optimizers, in the order of the config."""
        return tuple(member.stepper.optimizer for member in self._members)

    def step(self, grads: Sequence[Tensor | None], lr_factor: float) -> None:
        """Update the parameters.

        Args:
            grads: gradients, one per parameter, in the order of `names`.
            lr_factor: factor of the learning rate of every optimizer.
        """
        for member, indices, factor in zip(self._members, self._indices, self._factors, strict=True):
            member.stepper.step([grads[index] for index in indices], lr_factor * factor)

    def state(self, params: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:  # noqa: ARG002 - they belong to this class
        """Return the state of all optimizers; no parameter belongs to two of them."""
        return {key: tensor for member in self._members for key, tensor in member.stepper.state(member.params).items()}

    def restore(self, params: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:  # noqa: ARG002
        """Replace the state by that of a checkpoint."""
        for member in self._members:
            member.stepper.restore(member.params, tensors)


def _slots_agree(param: Tensor, slots: Mapping[str, Any]) -> bool:
    """Return whether every slot with the shape of the parameter has its strides."""
    same_shape = (slot for slot in slots.values() if isinstance(slot, Tensor) and slot.shape == param.shape)
    return all(slot.stride() == param.stride() for slot in same_shape)


def optimizer_state(optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the optimizer's state as `optimizer/<slot>/<name>` -> tensor, numbers as () tensors; no copies.

    Raises:
        ConfigError: it is neither of these.
    """
    state = {}
    for name, param in params.items():
        for slot, value in optimizer.state.get(param, {}).items():
            if value is not None:
                if not isinstance(value, Tensor | bool | int | float):
                    rule = f"keeps {slot} of {name} as a {type(value).__name__}. Checkpoints hold tensors and numbers."
                    raise ConfigError([Problem(key="optimizer", value=type(optimizer).__name__, rule=rule)])
                tensor = torch.as_tensor(value)
                state[f"optimizer/{slot}/{name}"] = tensor.to_dense() if tensor.is_sparse else tensor
    return state


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
    initial = optimizer.state if initial is None else initial
    fresh = {name: _copied(initial[param]) for name, param in params.items() if param in initial}
    saved: dict[str, dict[str, Tensor]] = {}
    for key in tensors:
        kind, _, rest = key.partition("/")
        slot, _, name = rest.partition("/")
        if kind == "optimizer" and name in params and "@" not in slot:  # `NAME@COPY` is the slot of another copy
            saved.setdefault(name, {})[slot] = tensors[key]
    slots = {**fresh, **saved}
    state = optimizer.state_dict()
    averages = {name: slots[name] for name in slots if slots[name].keys() <= SLOTS}  # load_state_dict needs others
    names = {id(param): name for name, param in params.items()}
    order = [names[id(param)] for group in optimizer.param_groups for param in group["params"]]
    loaded = {index: slots[name] for index, name in enumerate(order) if name in slots and name not in averages}
    optimizer.load_state_dict({**state, "state": loaded})
    for name, values in averages.items():
        optimizer.state[params[name]] = {slot: value.to(params[name].device) for slot, value in values.items()}
    for param, values in optimizer.state.items():
        # load_state_dict casts to the dtype of the parameter, not to its layout
        for slot, value in values.items():
            raw = slots[names[id(param)]].get(slot)
            if slot != "step" and isinstance(raw, Tensor) and isinstance(value, Tensor) and raw.dtype != value.dtype:
                value = values[slot] = raw.to(value.device)  # noqa: PLW2901
            if isinstance(value, Tensor) and value.shape == param.shape:
                values[slot] = in_layout(value, param.stride())


def _copied(slots: Mapping[str, Any]) -> dict[str, Any]:
    return {slot: value.clone() if isinstance(value, Tensor) else value for slot, value in slots.items()}
