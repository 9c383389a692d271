"""Tasks of reasoning-gym: both splits, and rows from which the family's own scorer scores."""

from typing import Any

import pytest
from source_builders import load_one, recipe

from areal_lite.data import gym
from areal_lite.data.prompts import load_source
from areal_lite.data.tokenizer import build_char_tokenizer
from areal_lite.errors import ConfigError, DataError
from areal_lite.types import Prompt
from areal_lite.verify.adapters import reasoning_gym
from areal_lite.wire import decode, encode

pytestmark = pytest.mark.gym


def make_settings(**settings: Any) -> dict[str, Any]:
    return {"dataset": "chain_sum", "train_size": 40, "eval_size": 20, **settings}


def questions(settings: dict[str, Any], split: Any) -> list[str]:
    return [row["question"] for row in gym.rows(split, **settings)]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_held_out_question_is_a_training_one(seed: int) -> None:
    """A family of 200 different questions, 20 of them held out, the others trained on, some of them twice.

    Seen failing without the comparison of questions, whatever the seeds.
    """
    arguments = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    settings = make_settings(**arguments, seed=seed, train_size=300)
    held_out, train = questions(settings, "eval"), questions(settings, "train")
    assert len(train) == 300
    assert len(held_out) == len(set(held_out)) == 20
    assert set(held_out).isdisjoint(train)


def test_the_tasks_depend_on_the_seed_and_near_seeds_share_none() -> None:
    """Item i of seed s is item i - 1 of seed s + 1 in the package. Seen failing with the seed handed on as it is."""
    first, again, second = (questions(make_settings(seed=seed, train_size=200), "train") for seed in (0, 0, 1))
    assert first == again
    assert len(set(first) & set(second)) < 20


@pytest.mark.parametrize(
    "family", ["chain_sum", "graph_color", "arc_1d", "word_sorting", "countdown", "time_intervals"]
)
def test_a_row_that_travelled_scores_as_the_package_does(family: str) -> None:
    """The package's own answer earns the full point where there is one, and nonsense next to nothing.

    `graph_color` has numbers for keys, which no message may have: seen failing without making them text.
    """
    settings = make_settings(dataset=family, train_size=4, eval_size=2)
    for prompt in load_one({"source": "reasoning_gym", "arguments": settings}, model={"max_context": 4096}):
        back: Prompt = decode(encode(prompt), Prompt)
        assert back.row["reasoning_gym_dataset"] == family
        if back.answer:
            assert reasoning_gym()(back.text, back.answer, back.answer, **back.row).reward == 1.0
        assert reasoning_gym()(back.text, "no idea", back.answer, **back.row).reward < 0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "chain_sums"}, r"arguments\.dataset, .* got 'chain_sums'; did you mean chain_sum\?"),
        ({"terms": 3}, r"arguments that are settings of chain_sum, got .*terms"),
        ({"min_terms": 9, "max_terms": 2}, "settings of chain_sum"),
        ({"size": 5}, "settings of chain_sum, got {'size': 5}"),
        ({"dataset": "coin_flip", "eval_size": 500, "max_trials": 4}, "got .* after 20 sets"),
    ],
)
def test_what_the_package_cannot_make_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        questions(make_settings(**settings), "train")


def test_a_character_that_the_model_lacks_is_named() -> None:
    config = recipe(data={"source": "reasoning_gym", "arguments": make_settings()})
    with pytest.raises(DataError, match=r"reasoning_gym train:0: .* the character 'S' \(U\+0053\)"):
        load_source(config, build_char_tokenizer("0123456789 "), "train")
