"""A variable whose text stays text where its key takes a number is caught here alone."""

from __future__ import annotations

import pytest

from tests.config.conftest import Refuse, Write
from trainkit.config.check import checked
from trainkit.config.compose import compose


def test_the_text_of_a_variable_is_read_as_what_its_key_takes(
    monkeypatch: pytest.MonkeyPatch, write_conf: Write
) -> None:
    given = {"EPOCHS": "3", "RATE": "1e-3", "WIDTHS": "[8, 16]", "ONE": "5", "NORM": "true", "NAME": "0123"}
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    folder = write_conf({"recipe/mine.yaml": "epochs: ${oc.env:EPOCHS}\nbatch: {global_size: '${oc.env:ABSENT,32}'}\n"})
    own = ("optimizer.lr=${oc.env:RATE}", "model.hidden=${oc.env:WIDTHS}", "model.batch_norm=${oc.env:NORM}")
    values = checked(compose(["recipe=mine", *own, "name=${oc.env:NAME}"], config_dirs=[folder])).values
    assert (values["epochs"], values["batch"]["global_size"], values["optimizer"]["lr"]) == (3, 32, 0.001)
    assert (values["model"]["hidden"], values["model"]["batch_norm"]) == ([8, 16], True)
    assert values["name"] == "0123", "a key that takes text keeps it"
    assert checked(compose(["model.hidden=[${oc.env:ONE},3]"])).values["model"]["hidden"] == [5, 3]


def test_a_text_that_is_no_number_is_refused_with_the_variable(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAD", "many")
    (problem,) = refuse("recipe=null", "model.dropout=${oc.env:BAD}")
    assert problem.startswith("model.dropout=many: must be a number. It is the value of the environment variable BAD.")
