"""vLLM's own settings in `rollout`: valid ones reach vLLM, the others are found before an engine starts.

And the error of an engine that ran out of memory.
"""

import asyncio
import io
import logging
import os
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import yaml
from pages import blocks
from vllm.v1.engine.exceptions import EngineDeadError

from areal_lite import node
from areal_lite.config.recipe import Config, parse_config
from areal_lite.data.tokenizer import build_char_tokenizer
from areal_lite.errors import ConfigError, EngineError
from areal_lite.rollout.engine import Sampling
from areal_lite.rollout.engine_process import EngineErrors
from areal_lite.rollout.engine_settings import engine_arguments
from areal_lite.rollout.vllm_engine import VllmEngine, check_engine_arguments


def make_config(arguments: dict[str, Any], **rollout: Any) -> Config:
    return parse_config({"rollout": {"engine_arguments": arguments, **rollout}})


def fail_to_start(why: str = "") -> None:
    """Start an engine on a folder that does not exist."""
    with mock.patch.dict(os.environ), pytest.raises(EngineError, match=rf"(?s)must start on /nowhere, got .*{why}"):
        asyncio.run(VllmEngine.start(make_config({}), model_folder="/nowhere"))


def test_what_vllm_takes_reaches_it_and_areal_lites_own_stands() -> None:
    """Seen failing with the recipe's over our own, and with prefix caching of our own."""
    config = make_config({"quantization": "fp8", "compilation_config": {"mode": 0}, "enable_prefix_caching": False})
    check_engine_arguments(config)
    found = engine_arguments(config, model_folder="m")
    assert (found["quantization"], found["compilation_config"]) == ("fp8", {"mode": 0})
    assert (found["enable_prefix_caching"], found["model"]) == (False, "m")
    assert engine_arguments(make_config({"dtype": "half"}), model_folder="m")["dtype"] == "float32"


def test_the_example_of_the_page_is_taken_on_a_cpu() -> None:
    """Seen failing with chunked prefill in it, which areal-lite sets on a CPU."""
    examples = [block.text for block in blocks("models.md", "yaml") if "engine_arguments" in block.text]
    assert examples
    for text in examples:
        check_engine_arguments(parse_config(yaml.safe_load(text)))


@pytest.mark.parametrize(
    ("arguments", "rollout", "message"),
    [
        ({"quantisation": "fp8"}, {}, r"engine_arguments\.quantisation is none .*; did you mean quantization\?"),
        ({"block_size": "a"}, {}, r"engine_arguments\.block_size: input should be a valid integer.*, got 'a'"),
        ({"compilation_config": {"mod": 0}}, {}, r"engine_arguments\.compilation_config\.mod: unexpected keyword"),
        ({"max_num_seqs": 4}, {}, r"engine_arguments\.max_num_seqs must not be set, as areal-lite"),
        ({"weight_transfer_config": {}}, {}, "weight_transfer_config must not be set"),
        ({"data_parallel_size": 2}, {}, "data_parallel_size must not be set"),
        ({"enable_prefix_caching": True}, {"interrupt": "keep_kv"}, "enable_prefix_caching must not be set"),
        ({}, {"tool_parser": "hermez"}, r"tool_parser must be one of .*got 'hermez'; did you mean hermes\?"),
        ({}, {"reasoning_parser": "a:b", "tool_parser": "x.py:f"}, r"^rollout\.reasoning_parser must .* got 'a:b'$"),
        ({"maxnumseqs": 1, "seed": "x"}, {}, "maxnumseqs is none(.|\n)*seed: input should be a valid integer"),
    ],
)
def test_what_it_does_not_take_is_named(arguments: dict[str, Any], rollout: dict[str, Any], message: str) -> None:
    """Seen failing without each of the checks, and with one parser looked up among the other's."""
    with pytest.raises(ConfigError, match=message):
        check_engine_arguments(make_config(arguments, **rollout))


@pytest.mark.parametrize("is_replaying", [False, True])
def test_routes_are_asked_for_where_they_are_replayed(is_replaying: bool) -> None:
    """Seen failing without the switch in the arguments, and without each of the refusals."""
    config = make_config({}, replay_routes=is_replaying)
    assert engine_arguments(config, model_folder="m")["enable_return_routed_experts"] is is_replaying
    if is_replaying:
        with pytest.raises(ConfigError, match=r"replay_routes needs engines on GPUs, .* got run\.device=cpu"):
            check_engine_arguments(config)
        on_gpus = {"run": {"device": "cuda"}, "weights": {"transport": "nccl"}, "rollout": {"replay_routes": True}}
        check_engine_arguments(parse_config(on_gpus))
        with pytest.raises(ConfigError, match=r"needs prefix caching, which rollout\.interrupt=keep_kv switches off"):
            make_config({}, replay_routes=True, interrupt="keep_kv")


@pytest.mark.parametrize("num_routes", [4, 5, 3])
def test_routes_are_those_of_all_tokens_but_the_last(num_routes: int) -> None:
    """Or nothing is known of whose they are. Seen failing with those of the completion alone.

    And the engine counts the context's tokens that were cached. Seen failing without the count.
    """
    routes = np.arange(num_routes * 2, dtype=np.uint8).reshape(num_routes, 2, 1)
    completion = SimpleNamespace(
        token_ids=[7, 8, 1],
        logprobs=[{token: SimpleNamespace(logprob=-0.5)} for token in (7, 8, 1)],
        weight_versions=[SimpleNamespace(version="3", start=0, end=3)],
        finish_reason="stop",
        stop_reason=None,
        routed_experts=routes,
    )

    class Core:
        async def generate(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
            yield SimpleNamespace(outputs=[completion], num_cached_tokens=1)

    engine = VllmEngine(
        Core(), build_char_tokenizer("0123456789"), None, text_of=str, errors=EngineErrors(), is_on_cpu=True
    )
    generated = engine.generate([5, 6], Sampling(max_new_tokens=3, temperature=1.0, seed=0))
    if num_routes == 4:
        assert asyncio.run(generated).routes is routes
        assert (engine.context_tokens, engine.cached_tokens) == (2, 1)
    else:
        with pytest.raises(EngineError, match=rf"all 2 \+ 3 tokens but the last, got {num_routes}"):
            asyncio.run(generated)


def test_a_type_of_vllms_that_cannot_be_read_is_left_to_vllm() -> None:
    """Seen failing without the exception."""
    check_engine_arguments(make_config({"lora_dtype": "auto", "quantization_config": {}}))


def test_an_engine_core_that_ran_out_of_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it was doing. Seen failing without the kernel's report in each place, with vLLM's own errors, without
    them as the cause.
    """

    class DeadCore:
        errored = True

        async def resume_generation(self) -> None:
            raise EngineDeadError

        async def generate(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
            raise EngineDeadError
            yield

    monkeypatch.setattr(node, "_oom_kills", lambda: "oom_kill 1000000")
    engine = VllmEngine(DeadCore(), None, None, text_of=str, errors=EngineErrors(), is_on_cpu=True)
    for call in (engine.resume, lambda: engine.score([1], [2])):
        with pytest.raises(
            EngineError, match=r"core process died .the kernel has killed a process here for lack of memory"
        ) as raised:
            asyncio.run(call())
        assert isinstance(raised.value.__cause__, EngineDeadError)
    fail_to_start("for lack of memory")


def test_an_engine_core_that_died_is_one_line_in_the_log() -> None:
    """Seen failing: vLLM's traceback, eight lines for each death."""
    fail_to_start()
    logger, handler = logging.getLogger("vllm.v1.engine.async_llm"), logging.StreamHandler(io.StringIO())
    logger.addHandler(handler)
    try:
        raise EngineDeadError
    except EngineDeadError:
        logger.exception("AsyncLLM output_handler failed.")
    finally:
        logger.removeHandler(handler)
    assert handler.stream.getvalue() == "AsyncLLM output_handler failed.\n"
