"""Verifiers with arguments, those that take long to load, and the learned reward among them, in real processes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from offline_builders import offline_config, offline_trainer
from train_builders import save_tiny_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from areal_lite.config import parse_config
from areal_lite.errors import ConfigError, VerifierError
from areal_lite.paths import REWARD_MODEL
from areal_lite.types import Prompt, Score
from areal_lite.verify.pool import VerifierPool
from areal_lite.verify.reward_model import reward_model

SLOW = """
import time
from areal_lite.verify.protocol import prepared_by

def prepare(*, model, **others):
    if model == "missing":
        raise FileNotFoundError("there is no such model")
    time.sleep(2.0)

@prepared_by(prepare)
def verify(prompt, completion, answer, *, model, weight=1.0, **row):
    return weight * len(model)
"""


def score(function: str, arguments: dict[str, Any], *, row: dict[str, Any] | None = None, **options: Any) -> Score:
    prompt = Prompt(prompt_id="train/0/0", text="12", token_ids=(1,), answer="3", row=row or {})

    async def run() -> Score:
        pool = VerifierPool(function, processes=1, arguments=arguments, **{"timeout_s": 30.0, **options})
        async with asyncio.timeout(120):
            try:
                await pool.start()
                (result,) = await pool.score(prompt, ["34"])
                return result
            finally:
                await pool.close()

    return asyncio.run(run())


@pytest.fixture
def slow(tmp_path: Path) -> str:
    (tmp_path / "slow.py").write_text(SLOW)
    return f"{tmp_path / 'slow.py'}:verify"


def test_arguments_come_with_every_call_and_loading_is_not_charged_to_one(slow: str) -> None:
    """Preparing takes two seconds, a call may take 1.5. Seen failing with `prepare` left to the first call."""
    assert score(slow, {"model": "four", "weight": 0.5}, timeout_s=1.5) == Score(reward=2.0, failure=None)


def test_a_model_that_cannot_be_loaded_fails_the_start(slow: str) -> None:
    with pytest.raises(VerifierError, match=r"cannot be prepared with \{'model': 'missing'\}(.|\n)*no such model"):
        score(slow, {"model": "missing"})


def test_loading_has_the_deadline_of_the_start(slow: str) -> None:
    with pytest.raises(VerifierError, match=r"must load within 0\.2 s"):
        score(slow, {"model": "x"}, start_timeout_s=0.2)


def test_a_column_with_the_name_of_an_argument_is_no_silent_choice(slow: str) -> None:
    """Seen failing with the row put over the arguments: the column won."""
    assert score(slow, {"model": "four"}, row={"model": "other"}).failure == "exception:TypeError"


def test_such_a_column_is_refused_before_anything_starts() -> None:
    from areal_lite.launch.train import check_arguments

    config = parse_config({"verifier": {"arguments": {"model": "x", "level": 2}}})
    prompt = Prompt(prompt_id="train/0/0", text="p", token_ids=(1,), answer="a", row={"level": 1})
    with pytest.raises(ConfigError, match=r"verifier\.arguments must have names of their own, got level"):
        check_arguments(config, [prompt])
    with pytest.raises(ConfigError, match="got answer"):
        check_arguments(parse_config({"verifier": {"arguments": {"answer": "x"}}}), [prompt])
    check_arguments(parse_config({"verifier": {"arguments": {"model": "x"}}}), [prompt])


# --- the learned reward ---


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A reward model after a few steps, so that its scores are not all 0."""
    trainer = offline_trainer(offline_config(tmp_path, "reward_model"))
    trainer.prepare()
    for _ in range(3):
        trainer.step()
    trainer.export(tmp_path / "rm")
    return str(tmp_path / "rm")


def test_the_learned_reward_is_the_score_of_prompt_completion_and_end(folder: str) -> None:
    """In its own process, by name. Seen failing without the end of sequence, which training always had."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ids = [*AutoTokenizer.from_pretrained(folder)("1234")["input_ids"], 1]
    with torch.no_grad():
        expected = float(model(input_ids=torch.tensor([ids])).logits[0, 0])
    assert abs(expected) > 1e-3
    assert score(REWARD_MODEL, {"model": folder}).reward == pytest.approx(expected, abs=1e-5)


def test_a_text_that_fills_the_context_is_scored_without_an_end(folder: str) -> None:
    """Seen failing with "reads at most 64 tokens, got 65"."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ids = AutoTokenizer.from_pretrained(folder)("1" * 60 + "2345")["input_ids"]
    with torch.no_grad():
        expected = float(model(input_ids=torch.tensor([ids])).logits[0, 0])
    assert reward_model("1" * 60, "2345", "3", model=folder) == pytest.approx(expected, abs=1e-5)


def test_the_learned_reward_refuses_what_it_cannot_read(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reads at most 64 tokens, got 72"):
        reward_model("1" * 62, "2" * 10, "3", model=folder)
    policy = save_tiny_model(tmp_path / "policy")
    with pytest.raises(ValueError, match="must be a reward model"):
        reward_model("1", "2", "3", model=policy)
