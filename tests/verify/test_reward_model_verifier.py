"""Verifiers with arguments, those that take long to load, and the learned reward among them, in real processes."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from offline_builders import offline_config, offline_trainer
from pool_builders import make_prompt, replies_of
from tokenizers.processors import TemplateProcessing
from train_builders import save_tiny_model
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from areal_lite.config.data import CHAT
from areal_lite.config.recipe import parse_config
from areal_lite.data.completions import load_offline
from areal_lite.errors import ConfigError
from areal_lite.verify.builtin.reward_model import reward_model

SLOW = """
import time
from areal_lite.verify import prepared_by

def prepare(**arguments):
    time.sleep(2.0)

@prepared_by(prepare)
def verify(prompt, completion, answer, *, model, weight=1.0, **row):
    return weight * len(model)
"""


def test_arguments_come_with_every_call_and_loading_is_not_charged_to_one(tmp_path: Path) -> None:
    """Preparing takes two seconds, a call may take 1.5. Seen failing with `prepare` left to the first call."""
    (file := tmp_path / "slow.py").write_text(SLOW)
    arguments = {"model": "four", "weight": 0.5}
    (reply,), _ = replies_of(f"{file}:verify", ["34"], arguments=arguments, timeout_s=1.5)
    assert (reply.reward, reply.failure) == (2.0, None)


def test_such_a_column_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """Of held-out rows as well: seen failing with each evaluation instead."""
    from areal_lite.launch.run.recipe_check import Reach, check_argument_names, check_recipe

    data = {"source": "jsonl"}
    for key, row in {"path": {}, "eval_path": {"level": 1}}.items():
        data[key] = str(tmp_path / key)
        Path(data[key]).write_text(json.dumps({"question": "1+1=?", "answer": "2", **row}))
    settings = {"data": data, "model": {"warm_start": {"steps": 0}}, "verifier": {"arguments": {"level": 2}}}
    with pytest.raises(ConfigError, match=r"verifier\.arguments must have names of their own, got level"):
        check_recipe(parse_config(settings), Reach.FILES)
    prompt = make_prompt(level=1)
    with pytest.raises(ConfigError, match="got answer"):
        check_argument_names(parse_config({"verifier": {"arguments": {"answer": "x"}}}), [prompt])
    check_argument_names(parse_config({"verifier": {"arguments": {"model": "x"}}}), [prompt])


# --- the learned reward ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward model after a few steps, so that its scores are not all 0."""
    tmp_path = tmp_path_factory.mktemp("reward")
    trainer = offline_trainer(offline_config(tmp_path, "reward_model"))
    trainer.prepare()
    for _ in range(3):
        trainer.step()
    trainer.export(tmp_path / "rm")
    return str(tmp_path / "rm")


@pytest.mark.slow
def test_the_learned_reward_is_the_score_of_prompt_completion_and_end(folder: str) -> None:
    """In its own process, by name; and in a batch, one text that is too long fails alone.

    Seen failing without the end of sequence, which training always had.
    """
    expected = logit(folder, "1234", end=[1])
    assert abs(expected) > 1e-3
    options: dict[str, Any] = {"prompt": make_prompt("3", text="12"), "arguments": {"model": folder}, "timeout_s": 30.0}
    (first, *batch), _ = replies_of("reward_model", ["34"], ["3", "4" * 90, "5"], **options)
    assert first.reward == pytest.approx(expected, abs=1e-5)
    assert [reply.failure for reply in batch] == [None, "exception:ValueError", None]


def logit(folder: str, text: str, *, end: Sequence[int] = ()) -> float:
    """What transformers gives for a text."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    ids = [*AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"], *end]
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids])).logits[0, 0])


def single(prompt: str, completion: str, *, model: str) -> float:
    (score,) = reward_model(model=model)([prompt], [completion], ["3"], [{}])
    return score


@pytest.mark.parametrize(
    ("chat", "ends", "expected"),
    [
        (False, [1, 11], ["812", "3<eos>", "44<eos>"]),
        (True, [1, 11], ["812", "39", "449"]),
        (True, [1], ["812", "39<eos>", "449<eos>"]),
    ],
)
def test_a_completion_is_scored_as_it_was_trained(
    folder: str, tmp_path: Path, chat: bool, ends: list[int], expected: list[str]
) -> None:
    """The tokenizer writes 8 before and <eos> after a text; turns end with 9, where generation may stop as well.

    Seen failing with chats begun with 8 and ended with <eos>, and trained to "39<eos>"; with plain prompts trained as
    "8812<eos>"; and, of a turn end that is no stop token, with <eos> alone.
    """
    folder = shutil.copytree(folder, str(tmp_path / "model"))
    (tmp_path / "model" / "generation_config.json").write_text(f'{{"eos_token_id": {ends}}}')
    (tmp_path / "rows.jsonl").write_text('{"prompt": "812", "chosen": "3", "rejected": "44"}\n' * 4)
    tokenizer = AutoTokenizer.from_pretrained(folder, bos_token="8")
    frame = TemplateProcessing(single="8 $A <eos>", special_tokens=[("8", 10), ("<eos>", 1)])
    tokenizer.backend_tokenizer.post_processor = frame
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.role != 'user' %}9<eos>{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    config = offline_config(tmp_path, "reward_model", data={"chat": chat, "eval_fraction": 0})
    example = load_offline(config, tokenizer).train[0]
    trained = [tokenizer.decode(ids) for ids in (example.prompt, *example.completions)]
    assert trained == expected
    row: dict[str, Any] = {CHAT: [{}]} if chat else {}
    (score,) = reward_model(model=folder)(["812"], ["3"], [""], [row])
    assert score == pytest.approx(logit(folder, "", end=[*example.prompt, *example.completions[0]]), abs=1e-5)


def test_a_text_that_fills_the_context_is_scored_without_an_end(folder: str) -> None:
    """Seen failing with "reads at most 64 tokens, got 65"."""
    expected = logit(folder, "1" * 60 + "2345")
    assert single("1" * 60, "2345", model=folder) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("padding", ["its own", "end of sequence", "none"])
@pytest.mark.parametrize("max_batch", [1, 3, 16])
def test_a_batch_gives_the_scores_of_single_calls(folder: str, tmp_path: Path, padding: str, max_batch: int) -> None:
    """Of different lengths, in any order, with the padding token of models from elsewhere too.

    Seen failing with padding on the left, with scores returned in the order of lengths, and with 0 filled in whatever
    the model's padding is.
    """
    folder = shutil.copytree(folder, str(tmp_path / "model"))
    if padding != "its own":
        config = AutoConfig.from_pretrained(folder)
        config.pad_token_id = config.eos_token_id if padding == "end of sequence" else None
        config.save_pretrained(folder)
    prompts = ["1", "12", "123456", "1", "99", "7", "1" * 50]
    completions = ["2", "3" * 20, "4", "", "0123456789", "7" * 40, "2"]
    expected = [single(*pair, model=folder) for pair in zip(prompts, completions, strict=True)]
    scores = reward_model(model=folder, max_batch=max_batch)(prompts, completions, [""] * 7, [{}] * 7)
    assert len({round(value, 4) for value in expected}) > 4
    assert scores == pytest.approx(expected, abs=1e-5)


def test_the_learned_reward_refuses_what_it_cannot_read(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reads at most 64 tokens, got 72"):
        single("1" * 62, "2" * 10, model=folder)
    policy = save_tiny_model(tmp_path / "policy")
    with pytest.raises(ValueError, match="must be a reward model"):
        single("1", "2", model=policy)
