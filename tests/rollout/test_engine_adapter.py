"""Adapters handed over to a vLLM engine: parity, a running request across a hand-over, and one that did not arrive."""

import asyncio
import time
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_builders import vllm_engine
from test_engine_parity import MAX_CONTEXT, SEQUENCES, Pair, expected_logprobs, largest_difference
from train_builders import save_tiny_model

from areal_lite.config.recipe import parse_config
from areal_lite.config.sections import LoraConfig
from areal_lite.rollout.engine import Sampling
from areal_lite.train.lora import adapters_off, add_adapters

pytestmark = pytest.mark.loop

LENGTH = 200


async def gather(scores: Iterable[Coroutine[Any, Any, np.ndarray]]) -> list[np.ndarray]:
    return list(await asyncio.gather(*scores))


def test_an_engine_computes_with_the_adapter_it_was_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine, three hand-overs: new and running requests follow the trainer; what is not loaded is noticed.

    Seen failing without `load_inplace`. Scores are asked for at once: so a run's parity check ended an engine that had
    not been told which layers to adapt.
    """
    folder = save_tiny_model(tmp_path / "model", max_context=MAX_CONTEXT)
    lora = {"rank": 5, "alpha": 7.0, "handover": "adapter"}
    config = parse_config(
        {
            "model": {"max_context": MAX_CONTEXT, "compute_dtype": "float32"},
            "rollout": {"slots": 16, "kv_cache_mb": 64},
            "trainer": {"lora": lora},
        }
    )
    with vllm_engine(config, folder) as (engine, background):
        pair = Pair(engine, background, transport="gloo", model_folder=folder)
        add_adapters(pair.model, LoraConfig.model_validate(lora), base_dtype=torch.float32, seed=0)
        publisher = pair.connect(adapter=config.trainer.sent_adapter)
        pair.perturb("lora_B")
        pair.hand_over(publisher)
        scores = (engine.score(prompt, output) for prompt, output in SEQUENCES)
        at_once = background.call(gather(scores))
        assert largest_difference(at_once, pair.expected()) < pair.tolerance
        with adapters_off(pair.model):
            assert largest_difference(pair.score(), pair.expected()) > 0.1

        # A sample that is drawn by two adapters.
        sampling = Sampling(max_new_tokens=LENGTH, temperature=1.0, seed=3, ignore_end=True)
        before = engine.tokens_generated
        running = asyncio.run_coroutine_threadsafe(engine.generate([2, 3], sampling), background.loop)
        deadline = time.monotonic() + 60
        while engine.tokens_generated < before + 20 and time.monotonic() < deadline:
            time.sleep(0.001)
        old_adapter = {name: value.clone() for name, value in pair.model.state_dict().items()}
        pair.perturb("lora_")
        pair.hand_over(publisher)
        sample = running.result(60)
        assert [span.version for span in sample.spans] == [1, 2]
        end = sample.spans[0].end
        whole = [([2, 3], sample.token_ids.tolist())]
        new = expected_logprobs(pair.model, whole)[0]
        pair.model.load_state_dict(old_adapter)
        old = expected_logprobs(pair.model, whole)[0]
        np.testing.assert_allclose(sample.logprobs, np.r_[old[:end], new[end:]], rtol=0, atol=pair.tolerance)
        assert np.abs(old - new).max() > 0.1

        async def nothing(_folder: str) -> None:
            pass

        monkeypatch.setattr(engine, "_load_adapter", nothing)
        with pytest.raises(Exception, match="the engine must have the adapter that was sent"):
            pair.hand_over(publisher)
