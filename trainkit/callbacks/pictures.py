"""Grid of images that a model generates from noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

import torch

from trainkit.callbacks.tensorboard import grid, png_bytes
from trainkit.errors import ConfigError, Problem
from trainkit.fields import at_least, at_most, cosmetic
from trainkit.frames import first_line
from trainkit.storage import naming
from trainkit.trainer.events import Callback, Row, Run

_WIDTH: Final = 576
"""Smaller grids are enlarged by a whole number to at most this width and height, in pixels."""


@dataclass(frozen=True, kw_only=True)
class Pictures(Callback):
    """Writes `pictures/step_000690.png` in the run folder at each evaluation: always from the same noise.

    The model is called as `model(noise, part)`, and returns (images, 1 or 3, height, width).
    """

    latent: Annotated[int, cosmetic, at_least(1)] = 16
    """Dimension of the noise vector that the model takes."""
    num_images: Annotated[int, cosmetic, at_least(1), at_most(1024)] = 64
    """Images in the grid, eight in a row."""
    part: Annotated[str, cosmetic] = "generator"
    """The second argument of the model's `forward`."""

    def run_start(self, run: Run) -> None:
        """Refuse a model that makes no such images, before the first step."""
        if run.is_owner or run.computes_together:
            self._images(run)

    def eval_end(self, run: Run, metrics: Row) -> None:
        """Write the images of this step."""
        if not (run.is_owner or run.computes_together):
            return
        images = self._images(run)
        if not run.is_owner:  # other ranks only take part in the computation
            return
        pixels = grid(images.float().cpu().numpy())
        size = max(1, _WIDTH // max(pixels.shape))
        content = png_bytes(pixels.repeat(size, axis=0).repeat(size, axis=1))
        path = run.folder / "pictures" / f"step_{run.state.step:06d}.png"
        path.parent.mkdir(exist_ok=True)
        with naming(path, needed=len(content)):
            path.write_bytes(content)

    def _images(self, run: Run) -> torch.Tensor:
        generator = torch.Generator().manual_seed(run.cfg.seed)
        noise = torch.randn(self.num_images, self.latent, generator=generator).to(run.device)
        model, was_training = run.model, run.model.training
        model.eval()
        try:
            with torch.no_grad():
                images = model(noise, self.part)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except (TypeError, RuntimeError) as error:
            rule = f"calls model(noise, {self.part!r}) with noise of {tuple(noise.shape)}: {first_line(error)}"
            raise ConfigError([Problem(key="callbacks.pictures", rule=rule)]) from error
        finally:
            model.train(was_training)
        if not isinstance(images, torch.Tensor) or images.ndim != 4 or images.shape[1] not in (1, 3):
            found = tuple(images.shape) if isinstance(images, torch.Tensor) else type(images).__name__
            rule = f"the model gives {found}, and images are (count, 1 or 3, height, width)."
            raise ConfigError([Problem(key="callbacks.pictures", rule=rule)])
        return images
