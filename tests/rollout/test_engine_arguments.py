"""What `rollout` says in vLLM's words: what vLLM takes goes through, the rest is found before an engine starts."""

from typing import Any

import pytest

from areal_lite.config.recipe import Config, parse_config
from areal_lite.errors import ConfigError
from areal_lite.rollout.engine_settings import engine_arguments
from areal_lite.rollout.vllm_engine import check_engine_arguments


def make_config(arguments: dict[str, Any], **rollout: Any) -> Config:
    return parse_config({"rollout": {"engine_arguments": arguments, **rollout}})


def test_what_vllm_takes_reaches_it_and_areal_lites_own_stands() -> None:
    """Seen failing with the recipe's over our own, and with prefix caching of our own."""
    config = make_config({"quantization": "fp8", "compilation_config": {"mode": 0}, "enable_prefix_caching": False})
    check_engine_arguments(config)
    found = engine_arguments(config, model_folder="m")
    assert (found["quantization"], found["compilation_config"]) == ("fp8", {"mode": 0})
    assert (found["enable_prefix_caching"], found["model"]) == (False, "m")
    assert engine_arguments(make_config({"dtype": "half"}), model_folder="m")["dtype"] == "float32"


@pytest.mark.parametrize(
    ("arguments", "rollout", "message"),
    [
        ({"quantisation": "fp8"}, {}, r"engine_arguments\.quantisation is none .*; did you mean quantization\?"),
        ({"block_size": "a"}, {}, r"engine_arguments\.block_size: input should be a valid integer.*, got 'a'"),
        ({"compilation_config": {"mod": 0}}, {}, r"engine_arguments\.compilation_config\.mod: unexpected keyword"),
        ({"max_num_seqs": 4}, {}, r"engine_arguments\.max_num_seqs must not be set, areal-lite does"),
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


def test_a_type_of_vllms_that_cannot_be_read_is_left_to_vllm() -> None:
    """Seen failing without the exception."""
    check_engine_arguments(make_config({"lora_dtype": "auto", "quantization_config": {}}))
