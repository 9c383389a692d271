"""Token in, token out, with the real engine: a game's log-probabilities are those of the joined sequence."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_builders import BackgroundLoop, vllm_engine
from episode_builders import given_mask, ids
from tokenizers import AddedToken
from toy_games import guess_number
from train_builders import save_tiny_model
from transformers import AutoModelForCausalLM

from areal_lite.config.recipe import Config, parse_config
from areal_lite.data.demonstrations import PRINTABLE
from areal_lite.data.prompts import load_source
from areal_lite.data.tokenizer import build_char_tokenizer
from areal_lite.rollout.engine import Sampling
from areal_lite.rollout.runner import load_workflows
from areal_lite.rollout.vllm_engine import VllmEngine
from areal_lite.rollout.worker import sample_seed
from areal_lite.types import Prompt, Sample, StopReason

pytestmark = pytest.mark.loop

MAX_CONTEXT = 128
LIMIT = Sampling(max_new_tokens=96, temperature=1.0)
TOLERANCE = 1e-4
"""Nats."""


def save_guesser(folder: Path) -> str:
    """Save a random model that likes digits and the end of a turn, so that its games have several turns."""
    tokenizer = build_char_tokenizer(PRINTABLE)
    tokenizer.add_tokens([AddedToken("7", special=True)])  # as a model's `</think>` may be
    save_tiny_model(folder, tie_embeddings=False, max_context=MAX_CONTEXT, tokenizer=tokenizer)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        # Every hidden state gets a part along (1, 1, ...), which these tokens' rows of the output layer favour.
        model.model.embed_tokens.weight += 2.0
        model.lm_head.weight[ids("0123456789$")] += 0.08
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def config() -> Config:
    return parse_config(
        {
            "model": {"max_context": MAX_CONTEXT, "compute_dtype": "float32"},
            "data": {"source": "guess_number", "arguments": {"max_number": 9}},
            "rollout": {"slots": 16, "kv_cache_mb": 64, "workflow": "guess_number", "max_new_tokens": 96},
        }
    )


@pytest.fixture(scope="module")
def started(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VllmEngine, BackgroundLoop]]:
    with vllm_engine(config, save_guesser(tmp_path_factory.mktemp("guesser"))) as pair:
        yield pair


def make_prompts(engine: VllmEngine) -> list[Prompt]:
    arguments = {"max_number": 9, "max_turns": 6, "train_size": 12, "eval_size": 4}
    config = parse_config({"data": {"source": "guess_number", "arguments": arguments}})
    return load_source(config, engine.tokenizer, "train")


def play_all(config: Config, engine: VllmEngine, prompts: list[Prompt], background: BackgroundLoop) -> list[Sample]:
    workflows = load_workflows(config)

    async def play() -> list[Sample]:
        games = (
            workflows.sample(
                engine,
                prompt,
                sampling=LIMIT,
                seed_of=lambda call, name=prompt.prompt_id: sample_seed(0, f"{name}#0", 0, call),
            )
            for prompt in prompts
        )
        return list(await asyncio.gather(*games))

    return background.call(play())


def test_behaviour_log_probabilities_are_those_of_the_joined_sequence(
    config: Config, started: tuple[VllmEngine, BackgroundLoop]
) -> None:
    """One prefill of prompt and sample, scored as a whole, agrees with every turn's own request.

    Seen failing, with the check of origins switched off, with contexts that hold another token than the sample at the
    end of earlier turns: 0.012 nats.
    """
    engine, background = started
    prompts = make_prompts(engine)
    samples = play_all(config, engine, prompts, background)
    turns = [sum(message["role"] == "assistant" for message in sample.messages) for sample in samples]
    assert max(turns) > 2, turns
    differences = []
    for prompt, sample in zip(prompts, samples, strict=True):
        scored, _ = background.call(engine.score(prompt.token_ids, sample.token_ids.tolist()))
        own = ~np.array(given_mask(sample))
        assert np.isfinite(scored).all()
        assert (sample.logprobs[~own] == 0).all()
        differences.append(np.abs(scored - sample.logprobs)[own].max())
        assert {span.version for span in sample.spans} <= {-1, 0}
        result = guess_number.score(
            prompt.text, sample.text, prompt.answer, messages=list(sample.messages), **dict(prompt.row)
        )
        assert 0.0 <= result.reward <= 1.0
    assert max(differences) < TOLERANCE, differences


def test_a_stop_string_ends_a_turn_and_changes_nothing_before_it(started: tuple[VllmEngine, BackgroundLoop]) -> None:
    """Its own tokens stay, as sampled. Seen failing with the end token's reason, and with special tokens left out.

    A special token is text, but for the ends of a sequence. Seen failing with `skip_special_tokens`: no "7" at all.
    """
    engine, background = started

    def draw(*stop: str) -> Sample:
        sampling = Sampling(max_new_tokens=40, temperature=1.0, seed=0, stop=stop, ignore_end=True)
        return background.call(engine.generate(ids("1-9?"), sampling))

    whole = draw()
    marks = {engine.tokenizer.eos_token, engine.tokenizer.pad_token}
    tokens = engine.tokenizer.convert_ids_to_tokens(whole.token_ids.tolist())
    assert whole.text == "".join(token for token in tokens if token not in marks)
    assert "7" in whole.text
    end = whole.token_ids.tolist().index(ids("$")[0])
    for stop, num_tokens in ((whole.text[2:5], 5), (engine.tokenizer.eos_token, end + 1)):
        cut = draw("not said", stop)
        assert cut.stop_reason is StopReason.STRING
        np.testing.assert_array_equal(cut.token_ids, whole.token_ids[:num_tokens])
        np.testing.assert_array_equal(cut.logprobs, whole.logprobs[:num_tokens])
