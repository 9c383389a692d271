"""Stop strings and special tokens of the real engine."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_builders import BackgroundLoop, vllm_engine
from episode_builders import ids
from tokenizers import AddedToken
from train_builders import save_tiny_model
from transformers import AutoModelForCausalLM

from areal_lite.config.recipe import parse_config
from areal_lite.data.demonstrations import PRINTABLE
from areal_lite.data.tokenizer import build_char_tokenizer
from areal_lite.rollout.engine import Sampling
from areal_lite.rollout.vllm_engine import VllmEngine
from areal_lite.types import Sample, StopReason

pytestmark = pytest.mark.loop

MAX_CONTEXT = 128


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
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VllmEngine, BackgroundLoop]]:
    model = {"max_context": MAX_CONTEXT, "compute_dtype": "float32"}
    config = parse_config({"model": model, "rollout": {"slots": 16, "kv_cache_mb": 64, "max_new_tokens": 96}})
    with vllm_engine(config, save_guesser(tmp_path_factory.mktemp("guesser"))) as pair:
        yield pair


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
