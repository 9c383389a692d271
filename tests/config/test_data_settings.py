"""Combinations of settings in the section `data` that are refused, each with field, value and remedy."""

from typing import Any

import pytest
from test_config import assert_refused

from areal_lite.config.recipe import parse_config

FILE = {"source": "jsonl", "path": "x.jsonl"}
GYM = {"source": "reasoning_gym", "arguments": {"dataset": "chain_sum"}}
REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"source": "parquet"}, ["data.source=parquet needs data.path", "give the path of a Parquet file"]),
    ({"source": "dataset"}, ["data.source=dataset needs data.path", "or a hub id"]),
    ({"prompt_column": "text"}, ["data.prompt_column=text is not read with data.source=arith"]),
    ({**GYM, "eval_path": "y.jsonl"}, ["data.eval_path=y.jsonl is not read with data.source=reasoning_gym"]),
    ({"columns": {"a": "b"}}, ["data.columns={'a': 'b'} is not read"]),
    ({**FILE, "arguments": {"size": 3}}, ["data.arguments={'size': 3} is not read with data.source=jsonl"]),
    ({"source": "jsnl"}, ["data.source must be one of arith, jsonl", "did you mean jsonl?"]),
    (
        {"source": "guess_numbr"},
        ["gridworld, guess_number, gymnasium, reasoning_gym, verifiers, or name", "did you mean guess_number?"],
    ),
    ({"source": "guess_number", "path": "x"}, ["data.path=x is not read with data.source=guess_number"]),
    ({**FILE, "columns": {"answer": "level"}}, ["data.columns.answer", "verifier argument", "'level'"]),
    ({**FILE, "columns": {"gold": "answer"}}, ["data.columns.gold=answer is the prompt or the answer"]),
    ({**FILE, "columns": {"a": "c", "b": "c"}}, ["data.columns.b=c is a second name of one column", "beside 'a'"]),
    ({**FILE, "verifier": "os:system"}, ["data.verifier must be a known name, got 'os:system'", "verifier.named"]),
    ({**FILE, "workflow": "x.py:f"}, ["data.workflow must be a known name", "rollout.workflows"]),
    ({**FILE, "verifier": "exakt"}, ["data.verifier must be one of", "did you mean exact?"]),
    ({"mix": {"a": {}}, "path": "x"}, ["data.path=x is not read with data.mix: set it in each source"]),
    ({"mix": {"a": {}}, "arith": {"max_terms": 3}}, ["data.arith is not read with data.mix"]),
    ({"mix": {"a/b": {}}}, ["a name in data.mix must match pattern '^[A-Za-z0-9_.-]+$'", "'a/b'"]),
    ({"mix": {"a": {"source": "jsonl"}}}, ["data.mix.a.source=jsonl needs data.mix.a.path, got none"]),
    ({"mix": {"a": {"template": "x"}}}, ["data.mix.a.template must contain {prompt}, got 'x'", "add it where"]),
    ({"mix": {"a": {"arith": {"min_terms": 5}}}}, ["data.mix.a.arith.min_terms", "5 and 4", "lower the one or raise"]),
]


@pytest.mark.parametrize(("data", "words"), REFUSED)
def test_a_meaningless_combination_is_refused(data: dict[str, Any], words: list[str]) -> None:
    assert_refused({"data": data}, words)


@pytest.mark.parametrize(
    "data",
    [
        {**FILE, "columns": {"b": "a", "a": "b"}, "verifier": "exact"},
        {"mix": {"a": {"weight": 2}, "b-1.x_y": {**GYM, "verifier": "mine"}}, "curriculum": 0.5},
        {"mix": {"only": FILE}},
    ],
)
def test_what_makes_sense_is_accepted_and_survives_saving(data: dict[str, Any]) -> None:
    """A saved recipe names every setting. Seen failing with `model_fields_set` in place of a look at the values."""
    config = parse_config({"data": data, "verifier": {"named": {"mine": {"function": "x.py:f"}}}})
    assert parse_config(config.model_dump()) == config
