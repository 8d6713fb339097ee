"""A key given by name that arrives as another value, or not at all, is caught here alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainkit.api.calls import composed
from trainkit.errors import ConfigError

NOTHING = dict.fromkeys(("model", "data", "objective", "optimizer"))


def values(**keys: Any) -> Mapping[str, Any]:
    """The values that a call with these keys composes."""
    return composed([], NOTHING, keys, write_source=False)[0].values


def test_a_text_stays_this_text_and_an_empty_mapping_leaves_callbacks_and_loggers_out() -> None:
    for name in ("null", "true", "nan", "1e5", "0x1", "1_000"):
        assert values(name=name)["name"] == name
    found = values(callbacks={}, logger={})
    assert (found["callbacks"], found["logger"]) == ({}, {})


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"epohs": {}}, "epohs: no such key. Did you mean epochs?"),
        ({"loader": {}}, "loader={}: belongs to every run and cannot be cleared. Give values: loader.KEY=VALUE."),
        ({"steps": 1j}, "steps: is given as complex. Keys take numbers, texts and lists"),
        ({"cluster": {"x": [{"y": {1}}]}}, "cluster.x.y: is given as set. Keys take numbers, texts and lists"),
    ],
)
def test_what_has_no_effect_is_refused_by_name(keys: Mapping[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        values(**keys)
    assert [text.startswith(line) for text in map(str, caught.value.problems)] == [True]


def test_numbers_paths_and_keys_with_dots_arrive_as_given() -> None:
    keys = {"optimizer.lr": np.float32(0.5), "epochs": np.int64(3), "report_page": np.bool_(False)}
    node = {"_target_": "torch.nn.Identity", "weights": {"layer.0": 1.5, "b": [{"c": "x, y"}, None]}}
    found = values(**keys, resume=Path("a b/c=1\\d"), callbacks={"mine": node})
    assert (found["optimizer"]["lr"], found["epochs"], found["report_page"]) == (0.5, 3, False)
    assert (found["resume"], found["callbacks"]["mine"]) == ("a b/c=1\\d", node)
