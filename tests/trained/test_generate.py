"""Texts of a language model: a cached text that differs from the plain one past the context is caught here alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import trainkit
from trainkit.cli import main
from trainkit.errors import ConfigError, TrainingError
from trainkit.models.gpt import Gpt
from trainkit.models.sampling import Sampling
from trainkit.trained import generate as texts
from trainkit.trained.generate import generate

DRAWN = Sampling(temperature=1.0, top_k=7, top_p=0.9)


def gpt() -> Gpt:
    torch.manual_seed(0)
    return Gpt(vocab_size=23, context=12, num_layers=2, num_heads=2, width=16, dropout=0.5).double()


class Plain(nn.Module):
    """The same model without a cache."""

    def __init__(self, model: Gpt) -> None:
        super().__init__()
        self.model, self.context = model, model.context

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.model(tokens)
        return scores


def test_a_cache_changes_no_score_however_a_text_is_cut() -> None:
    model = gpt().eval()
    tokens = torch.randint(23, (3, 12), generator=torch.Generator().manual_seed(1))

    cache = model.new_cache()
    scores = torch.cat([model.extend(part, cache) for part in torch.split(tokens, [5, 1, 2, 4], dim=1)], dim=1)

    torch.testing.assert_close(scores, model(tokens), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("sampling", [Sampling(), DRAWN])
def test_a_cached_text_is_the_plain_one_past_the_context_too(sampling: Sampling) -> None:
    model, prompts = gpt(), [[1, 2, 3], [4, 5, 6], [7] * 15]

    texts = [generate(variant, prompts, sampling=sampling, max_tokens=14) for variant in (model, Plain(model))]

    assert texts[0] == texts[1]
    assert model.training


def test_a_text_does_not_depend_on_the_prompts_beside_it() -> None:
    together = generate(gpt(), [[1, 2], [3], [4, 5]], sampling=DRAWN, max_tokens=6, seed=3)
    assert generate(gpt(), [[1, 2], [8, 8], [4, 5]], sampling=DRAWN, max_tokens=6, seed=3)[::2] == together[::2]
    assert generate(gpt(), [[1, 2]], sampling=DRAWN, max_tokens=6, seed=4) != together[:1]


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [
        (Sampling(), {1}),
        (Sampling(temperature=1.0, top_k=2), {1, 3}),
        (Sampling(temperature=1.0, top_p=0.5), {1}),
        (Sampling(temperature=1.0, top_p=0.81), {0, 1, 3}),
        (Sampling(temperature=1.0, top_k=2, top_p=1.0), {1, 3}),
        (Sampling(temperature=0.01), {1}),
    ],
)
def test_only_likely_tokens_are_drawn(sampling: Sampling, possible: set[int]) -> None:
    scores = torch.tensor([[0.15, 0.5, 0.05, 0.3]]).log().expand(400, 4)
    assert set(sampling.choose(scores, torch.Generator().manual_seed(0)).flatten().tolist()) == possible


def test_a_model_of_transformers_is_continued_by_its_own_generate_up_to_its_end_token() -> None:
    pytest.importorskip("transformers")
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=12, n_positions=64, bos_token_id=0, eos_token_id=11)
    ).eval()
    prompts = [[1, 2, 3], [4, 5, 6], [7]]

    greedy = generate(model, prompts, sampling=Sampling(), max_tokens=5)
    drawn = generate(model, prompts, sampling=DRAWN, max_tokens=60)

    for prompt, text in zip(prompts, greedy, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
        assert [*prompt, *text] == expected[0].tolist()
    assert not any(11 in text for text in drawn)
    assert any(len(text) < 60 for text in drawn)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model of the bytes of Python's library, after two steps."""
    root = tmp_path_factory.mktemp("texts")
    overrides = ["recipe=python_source", "data.max_bytes=20_000", "steps=2", "callbacks=[]", "logger=[]", "quiet=true"]
    small = ["model.num_layers=1", "model.width=8", "model.num_heads=1", "warmup.steps=0", "eval.every_steps=null"]
    trainkit.train(trainkit.compose([*overrides, *small]), run_dir=root / "run")
    return root / "run"


@pytest.mark.slow
def test_the_terminal_shows_the_text_that_python_gets(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = list[torch.device]()
    monkeypatch.setattr(texts, "use_device", used.append)
    (text,) = trainkit.generate(run, ["def "], max_tokens=9, temperature=1.5, seed=1)
    assert used == [torch.device("cpu")]
    capsys.readouterr()

    assert (
        main(["generate", str(run), "--prompt", "def ", "--max-tokens", "9", "--temperature", "1.5", "--seed", "1"])
        == 0
    )
    assert capsys.readouterr().out == f"def {text}\n"


def test_prompts_of_a_file_are_answered_in_its_order(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts = ["def f(", "é", "x"]
    (tmp_path / "prompts").write_text("def f(\n\né\nx\n", encoding="utf-8")

    assert main(["generate", str(run), "--prompts", str(tmp_path / "prompts"), "--max-tokens", "4", "--json"]) == 0

    document = json.loads(capfd.readouterr().out)
    expected = trainkit.generate(run, prompts, max_tokens=4)
    texts = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, expected, strict=True)]
    assert document == {"format": 1, "texts": texts}


def test_all_bad_flags_are_named_at_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max-tokens", "0", "--top-p", "1.5", "--seed", "1", "--temperature", "0"]

    assert main(["generate", str(run), *flags, "--prompts", "nowhere"]) == 2

    lines = capsys.readouterr().err.splitlines()[1:]
    keys = ["--max-tokens=0", "--top-p=1.5", "--top-p=1.5", "--seed=1", "--prompts=nowhere"]
    assert [line.strip().partition(": ")[0] for line in lines] == keys
    assert "the most likely token is chosen" in lines[3]


def test_a_model_or_a_run_that_is_none_of_language_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"Flatten gives \(1, 2\) for \(1, 2\) tokens"):
        generate(nn.Flatten(), [[1, 2]], sampling=Sampling(), max_tokens=1)
    trainkit.train(trainkit.compose(["steps=1", "callbacks=[]", "logger=[]", "quiet=true"]), run_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match="data=Digits: has no encode and no decode"):
        trainkit.generate(tmp_path / "run", ["a"])
    with pytest.raises(ConfigError, match="is not a run folder"):
        trainkit.generate(tmp_path, ["a"])
