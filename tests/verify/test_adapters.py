"""Reward functions of other libraries: called as they expect, and their answers read as they mean them."""

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import msgpack
import pytest
from http_server import answering
from places import FIXTURES

from areal_lite.errors import VerifierUnavailable
from areal_lite.verify.adapters import openrlhf, reasoning_gym, trl, verl
from areal_lite.verify.result import VerifyResult

FUNCTIONS = FIXTURES / "reward_functions.py"
GYM_FAMILIES = (
    "arc_1d", "arc_agi", "base_conversion", "basic_arithmetic", "chain_sum", "countdown", "family_relationships",
    "fraction_simplification", "kakurasu", "knights_knaves", "letter_counting", "maze", "mini_sudoku",
    "number_sorting", "polynomial_equations", "prime_factorization", "rearc", "shortest_path", "simple_equations",
    "sokoban", "spell_backward", "syllogism", "tower_of_hanoi", "word_ladder", "zebra_puzzles",
)  # fmt: skip


def call_trl(
    name: str, completions: list[str], rows: list[dict[str, Any]] | None = None, **arguments: Any
) -> list[Any]:
    answers = [f"a{index}" for index in range(len(completions))]
    verify = trl(function=f"{FUNCTIONS}:{name}", **arguments)
    results = asyncio.run(verify(["p"] * len(completions), completions, answers, rows or [{}] * len(completions)))
    return [result.reward if isinstance(result, VerifyResult) else result for result in results]


def call_verl(name: str, completion: str, answer: str, *, keywords: Any = None, **row: Any) -> VerifyResult:
    verify = verl(function=f"{FUNCTIONS}:{name}", arguments=keywords or {})
    return asyncio.run(verify("p", completion, answer, **row))


def test_a_trl_function_gets_texts_and_columns_as_lists() -> None:
    """`a0` is the answer of the first completion. Seen failing with columns handed over row by row."""
    assert call_trl("digits", ["a1b22", ""]) == [3.0, 0.0]
    assert call_trl("matches_solution", ["a0", "a0"], answer_column="solution") == [1.0, 0.0]
    assert call_trl("matches_solution", ["a0", "a0"]) == [1.0, 0.0]
    rows = [{"solution": "x"}, {"solution": "y", "other": 1}]
    assert call_trl("matches_solution", ["y", "y"], rows) == [0.0, 1.0]


def test_a_trl_function_may_return_a_tensor(tmp_path: Path) -> None:
    """As TRL takes it. Seen failing with a reward of the wrong type, torch.Tensor, for each."""
    file = tmp_path / "rewards.py"
    file.write_text(
        "import torch\ndef same(completions, **_): return torch.tensor([float(c == 'a') for c in completions])"
    )
    call = trl(function=f"{file}:same")(["p", "p"], ["a", "b"], ["", ""], [{}, {}])
    assert [result.reward for result in asyncio.run(call)] == [1.0, 0.0]


def test_a_trl_none_stays_none_and_is_no_reward() -> None:
    """None means "does not apply". Seen failing with None read as 0. What becomes of it: test_verify_command.py."""
    assert call_trl("only_math", ["x", "x"], [{"task": "math"}, {"task": "code"}]) == [1.0, None]


def test_a_trl_function_gets_chats_where_asked_or_where_there_were_turns() -> None:
    """Each message counts 10. Seen failing with the messages of the first row for all rows."""
    turns = [
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "right"},
    ]
    assert call_trl("last_role", ["right", "wrong"], chat=True) == [11.0, 10.0]
    assert call_trl("last_role", ["x", "right"], [{"messages": turns}, {"messages": turns[2:]}]) == [31.0, 11.0]


def test_a_trl_function_gets_the_chat_that_the_model_was_given() -> None:
    """Without a word in the recipe. Seen failing with the template's text as a message, and with texts handed over."""
    row = {"prompt_messages": [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2"}]}
    assert call_trl("continues", ["4", "5"], [row, row]) == [1.0, 0.0]
    assert call_trl("digits", ["a1b22"], [row], chat=False) == [3.0]


def test_a_trl_function_gets_texts_or_chats_row_by_row() -> None:
    """Of a mix of both, a call for each form. Seen failing with all as chats, and with both in one call."""
    rows = [{"prompt_messages": [{"role": "user", "content": "2"}]}, {}, {"messages": [{"role": "user"}]}, {}]
    assert call_trl("is_chat", ["4", "5", "6", "7"], rows) == [1.0, 0.0, 1.0, 0.0]


def test_a_trl_function_gives_a_reward_for_each_completion_of_a_kind() -> None:
    """Seen failing: one reward too many for the chats, and one too few for the texts, were taken as they came."""
    with pytest.raises(ValueError, match="expected a reward for each of 1 completions, got 2"):
        call_trl("two", ["a", "b"], rows=[{"messages": [{"role": "assistant", "content": "a"}]}, {}])


def test_a_trl_function_may_be_async_and_log_metrics() -> None:
    call = trl(function=f"{FUNCTIONS}:waits")(["p"], ["c"], ["a"], [{}])
    assert asyncio.run(call) == [VerifyResult(0.5, metrics={"mean_length": 2.5})]


def test_a_verl_function_gets_its_four_arguments() -> None:
    """1 for the match, 1 for the source, 4 from extra_info. Seen failing with the answer column before verl's own."""
    assert call_verl("compute_score", "7", "7").reward == 1.0
    assert call_verl("compute_score", "7", "8", data_source="gsm8k").reward == 1.0
    row = {"data_source": "gsm8k", "reward_model": {"style": "rule", "ground_truth": "7"}, "extra_info": {"bonus": 4}}
    assert call_verl("compute_score", "7", "8", **row).reward == 6.0
    assert call_verl("compute_score", "7", "8", bonus=3).reward == 3.0


def test_a_verl_mapping_gives_its_score_and_its_other_numbers() -> None:
    result = call_verl("compute_score_with_more", "7", "7", keywords={"scale": 2.0})
    assert (result.reward, dict(result.metrics)) == (2.0, {"acc": 1.0, "length": 2.0})


def test_other_libraries_get_several_answers_as_a_list() -> None:
    """Seen failing with the first alone handed over."""
    row = {"reference_answers": ["5", "7"]}
    call = trl(function=f"{FUNCTIONS}:any_solution")(["p"], ["c"], ["5"], [row])
    assert [one.reward for one in asyncio.run(call)] == [2.0]
    assert call_verl("any_ground_truth", "7", "5", **row).reward == 2.0
    (said,) = openrlhf(function=f"{FUNCTIONS}:any_label")(["p"], ["7"], ["5"], [row])
    assert said.reward == 2.0


def test_a_remote_reward_model_is_asked_as_openrlhf_asks() -> None:
    """Seen failing with completions in the place of queries. One that is not there may be asked again."""
    with answering() as server:
        server.body = {"rewards": [1.0, 0.0], "extra_logs": {"share": 0.5, "length": [1, 2]}}
        said = openrlhf(url=server.url)(["p", "p"], ["7", "8"], ["7", "7"], [{}, {}])
    assert [list(asked.values()) for asked in server.asked] == [[["p7", "p8"], ["p", "p"], ["7", "7"]]]
    assert said == [VerifyResult(1.0, metrics={"length": 1}), VerifyResult(0.0, metrics={"length": 2})]
    with pytest.raises(VerifierUnavailable, match="refused"):
        openrlhf(url="http://127.0.0.1:9")(["p"], ["7"], ["7"], [{}])
    with pytest.raises(ValueError, match="needs a function or a url, got None and None: give one"):
        openrlhf()


@pytest.mark.parametrize(
    ("status", "error"), [(404, HTTPError), (429, VerifierUnavailable), (503, VerifierUnavailable)]
)
def test_a_server_that_refuses_a_request_is_there(status: int, error: type[Exception]) -> None:
    """Such a request is not sent again. Seen failing (`VerifierUnavailable`) with every error of urllib one."""
    with answering() as server:
        server.status = status
        with pytest.raises(error, match=str(status)):
            openrlhf(url=server.url)(["p"], ["7"], ["7"], [{}])


def gym_row(family: str, index: int) -> dict[str, Any]:
    """A row as it arrives at the verifier: it has travelled."""
    import reasoning_gym as gym

    entry = gym.create_dataset(family, seed=11, size=index + 1)[index]
    row = {"reasoning_gym_dataset": family, "reasoning_gym_entry": entry}
    travelled: dict[str, Any] = msgpack.unpackb(msgpack.packb(json.loads(json.dumps(row))))
    return travelled


@pytest.mark.gym
@pytest.mark.parametrize("family", GYM_FAMILIES)
def test_gold_answers_of_a_family_score_1_and_others_less(family: str) -> None:
    """Seen failing for arc_agi and rearc with an entry handed over as it arrives, with lists where it had tuples."""
    for index in range(2):
        row = gym_row(family, index)
        gold = row["reasoning_gym_entry"]["answer"]
        for completion in (gold, f" {gold}\n", f"I think so.\n#### {gold}", f"So: <answer>{gold}</answer>."):
            assert reasoning_gym()("p", completion, gold, **row).reward == 1.0
        assert reasoning_gym()("p", "<answer>certainly not this</answer>", gold, **row).reward < 1.0


@pytest.mark.gym
def test_the_answer_is_taken_from_where_the_recipe_says() -> None:
    row = gym_row("chain_sum", 0)
    gold = row["reasoning_gym_entry"]["answer"]
    assert reasoning_gym(extract=r"#(-?\d+)")("p", f"1+1=2#{gold}", gold, **row).reward == 1.0
    assert reasoning_gym(extract=r"^\S+")("p", f"{gold} 7{gold}", gold, **row).reward == 1.0
    nothing = reasoning_gym(extract=r"#(-?\d+)")("p", gold, gold, **row)
    assert (nothing.reward, nothing.feedback) == (0.0, "no answer found")


@pytest.mark.gym
def test_thoughts_hold_no_answer_and_nan_earns_nothing() -> None:
    """Seen failing with the first closing tag taken, thoughts read, and nan handed to the scorer, which gives 1.0."""
    row = gym_row("complex_arithmetic", 0)
    gold = row["reasoning_gym_entry"]["answer"]
    for completion in (f"<think><answer>1</answer></think>{gold}", f"<answer>a<answer>{gold}</answer></answer>"):
        assert reasoning_gym()("p", completion, gold, **row).reward == 1.0
    for answer in ("nan", "-NaN", "1+nanj"):
        assert reasoning_gym()("p", f"<answer>{answer}</answer>", gold, **row).reward == 0.0


@pytest.mark.gym
def test_an_answer_that_breaks_its_scorer_scores_0_and_a_broken_row_fails() -> None:
    """prime_factorization parses answers without care. Seen failing with every exception of a scorer passed on."""
    row = gym_row("prime_factorization", 0)
    assert reasoning_gym()("p", "2 times 3", "", **row).reward == 0.0
    row["reasoning_gym_entry"]["answer"] = "two times three"
    with pytest.raises(ValueError, match="two times three"):
        reasoning_gym()("p", "2 times 3", "", **row)
