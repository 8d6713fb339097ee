"""Composition of a run's config, before Hydra runs.

Hydra supplies its grammar of overrides, its search path and its defaults list. The values are then merged here, layer
by layer, so that every key records the file and line, or the argument, that set it. Unknown keys are all reported
together by the check; Hydra would end the program at the first one.

    hydra_adapter   Hydra's internal classes: the only import of them
    files           one search path: parse arguments, read its files with line numbers; launchers and sweepers, which
                    say what they do with the keys of a sweep; Hydra's global state
    composer        compose runs: arguments and the defaults list; enumerate sweeps
    layers          merging of values, exclusive keys, interpolations
    space           the arguments of a sweep as axes, and every point of a grid
    bounds          limits on what Hydra parses, resolves and calls
    jobs            composed runs as Hydra jobs: Hydra's config loader, a job in its folder, a sweep, completion
"""

from __future__ import annotations

from trainkit.config.compose.composer import Composer, compose, foreign_keys

__all__ = ["Composer", "compose", "foreign_keys"]
