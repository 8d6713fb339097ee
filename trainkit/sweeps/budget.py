"""The budget of a sweep: device hours, US dollars or time, held against plans at first, and enforced later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from trainkit.config.schema import RunConfig
from trainkit.config.values import seconds_of
from trainkit.errors import ConfigError, Problem

_KEY: Final = "sweep.budget"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What the jobs of a sweep may use together, over all its starts."""

    text: str
    """The value of the key."""
    limit_s: float
    """Seconds: of devices, or of the clock while a job runs."""
    of_devices: bool
    """Whether the seconds of each device count."""

    @classmethod
    def of(cls, cfg: RunConfig, *, on_gpus: bool) -> Budget | None:
        """Return `sweep.budget`, at the price of the hardware of a config; None without one.

        Args:
            cfg: the config of the sweep.
            on_gpus: whether jobs take GPUs; without them the host is the device.

        Raises:
            ConfigError: there is no GPU here, or no price.

        Example:
            >>> from trainkit.config.sections import SweepConfig
            >>> cfg = RunConfig(sweep=SweepConfig(budget="3usd"), hardware={"price_usd_h": 1.5})
            >>> Budget.of(cfg, on_gpus=True).limit_s
            7200.0
        """
        text, price_usd_h = cfg.sweep.budget, cfg.hardware.get("price_usd_h")
        if text is None:
            return None
        if text.endswith("gpu_hours"):
            if not on_gpus:
                rule = "counts GPUs, and there are none here. Give a time, as 30min, or usd."
                raise ConfigError([Problem(key=_KEY, value=text, rule=rule)])
            return cls(text=text, limit_s=3600 * float(text.removesuffix("gpu_hours")), of_devices=True)
        if not text.endswith("usd"):
            return cls(text=text, limit_s=seconds_of(text), of_devices=False)
        if not price_usd_h:
            rule = "needs the price of a device. Give hardware=CHOICE hardware.price_usd_h=DOLLARS, or another unit."
            raise ConfigError([Problem(key=_KEY, value=text, rule=rule)])
        return cls(text=text, limit_s=3600 * float(text.removesuffix("usd")) / price_usd_h, of_devices=on_gpus)

    def share(self, elapsed_s: float, device_s: float) -> float:
        """Return the share of the budget that some seconds use, 0 to 1 and above."""
        return (device_s if self.of_devices else elapsed_s) / self.limit_s

    def refuse(self, planned: Sequence[tuple[float, float]], *, slots: int, jobs: int) -> None:
        """Refuse a sweep whose planned jobs use more.

        Args:
            planned: seconds and devices of each planned job.
            slots: devices that work at a time.
            jobs: number of jobs; those that are not planned yet are as long as the planned ones.

        Raises:
            ConfigError: names the planned share.

        Example:
            >>> hour = Budget(text="1h", limit_s=3600.0, of_devices=False)
            >>> hour.refuse([(1800.0, 1), (1800.0, 1)], slots=1, jobs=2)
        """
        more = jobs / max(len(planned), 1)
        device_s = sum(seconds * devices for seconds, devices in planned) * more
        elapsed_s = max([device_s / slots, *(seconds for seconds, _ in planned)])
        if (share := self.share(elapsed_s, device_s)) > 1:
            rule = f"is too small: the plans of {jobs} jobs take {share:.3g} times as much. Give more, or shorter jobs."
            raise ConfigError([Problem(key=_KEY, value=self.text, rule=rule)])
