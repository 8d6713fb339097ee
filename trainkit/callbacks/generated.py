"""What a model generates during a run: a text, and images from noise."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

import torch

from trainkit.callbacks.tensorboard import grid, write_png
from trainkit.errors import ConfigError, Problem, first_line
from trainkit.fields import above, at_least, at_most, cosmetic, unit
from trainkit.files import naming
from trainkit.trainer.events import Callback, Row, Run

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Sample(Callback):
    """Prints a text that the model continues from `prompt`, at the end of the run, and writes it to `sample.txt`.

    The model must have `generate`, and the dataset `encode` and `decode`.
    """

    prints: ClassVar[bool] = True
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"model": ("generate",), "data": ("encode", "decode")}

    prompt: Annotated[str, cosmetic] = "\n"
    """The beginning of the text."""
    num_tokens: Annotated[int, cosmetic, at_least(1), unit("tokens")] = 200
    """Tokens to add."""
    temperature: Annotated[float, cosmetic, above(0)] = 0.8
    """Values below 1 favour the most likely tokens."""
    top_k: Annotated[int | None, cosmetic, at_least(1), unit("tokens")] = 20
    """Sample from this many of the most likely tokens; null: from all."""

    def run_start(self, run: Run) -> None:
        """Check before the training whether a text can be generated."""
        built = {"model": run.model, "data": run.datasets.get("train")}
        lacking = [name for group, names in self.needs.items() for name in names if not hasattr(built[group], name)]
        if lacking:
            rule = f"needs a model with generate and a dataset with encode and decode; missing: {', '.join(lacking)}."
            raise ConfigError([Problem(key="callbacks.sample", rule=rule)])
        if not run.datasets["train"].encode(self.prompt):
            rule = "has no character of the dataset's vocabulary."
            raise ConfigError([Problem(key="callbacks.sample.prompt", value=repr(self.prompt), rule=rule)])

    def train_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """Write the text, on rank 0; not if the run was stopped early."""
        if result.get("status") != "finished" or not (run.is_owner or run.computes_together):
            return
        try:
            text = self.text(run)
        except (IndexError, KeyError, ValueError) as error:
            # The model may have more tokens than the text; a finished training must not fail because of that.
            _log.warning("sample: the dataset cannot decode the tokens of the model: %s", error)
            return
        if not run.is_owner:  # other ranks only take part in the computation
            return
        path = run.folder / "sample.txt"
        with naming(path, needed=len(text.encode())):
            path.write_text(text + "\n", encoding="utf-8", newline="\n")
        indented = "\n".join(f"  {line}" for line in text.splitlines())
        sys.stdout.write(f"sample\n{indented}\n")
        sys.stdout.flush()

    def text(self, run: Run) -> str:
        """Return the prompt and its continuation, keyed by the run's seed."""
        model: Any = run.model
        data = run.datasets["train"]
        generator = torch.Generator(run.device).manual_seed(run.cfg.seed)
        start = torch.tensor([data.encode(self.prompt)], device=run.device)
        tokens = model.generate(
            start,
            num_tokens=self.num_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            generator=generator,
        )
        text: str = data.decode(tokens[0].tolist())
        return text


_WIDTH: Final = 576
"""Smaller grids are enlarged by a whole number to at most this width and height, in pixels."""


@dataclass(frozen=True, kw_only=True)
class Pictures(Callback):
    """Writes `pictures/step_000690.png` in the run folder at each evaluation: always from the same noise.

    The model is called as `model(noise, part)`, and returns (images, 1 or 3, height, width).
    """

    latent: Annotated[int, cosmetic, at_least(1), unit("numbers")] = 16
    """Dimension of the noise vector that the model takes."""
    num_images: Annotated[int, cosmetic, at_least(1), at_most(1024), unit("images")] = 64
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
        path = run.folder / "pictures" / f"step_{run.state.step:06d}.png"
        write_png(path, pixels.repeat(size, axis=0).repeat(size, axis=1))

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
            actual = tuple(images.shape) if isinstance(images, torch.Tensor) else type(images).__name__
            rule = f"the model gives {actual}, and images are (count, 1 or 3, height, width)."
            raise ConfigError([Problem(key="callbacks.pictures", rule=rule)])
        return images
