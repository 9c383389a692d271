"""The games: rows, rules, verifiers that believe nothing, and optimal returns."""

import asyncio
from typing import Any

import pytest
from chat_builders import LONG
from episode_builders import Speaker, load, make_prompt, play
from toy_games import gridworld, guess_number
from toy_games.gridworld import optimal_return, read_move
from toy_games.guess_number import read_guess
from toy_games.maze import MOVES, read_maze

from areal_lite.config.recipe import parse_config
from areal_lite.data.demonstrations import PRINTABLE
from areal_lite.data.prompts import load_source
from areal_lite.data.tokenizer import build_char_tokenizer
from areal_lite.verify.result import VerifyResult

GUESSES = {"max_number": 20, "train_size": 300, "eval_size": 40}
MAZES = {"size": 4, "walls": 4, "max_turns": 8, "train_size": 300, "eval_size": 40}
GAMES = [("guess_number", guess_number.rows, GUESSES), ("gridworld", gridworld.rows, MAZES)]


def says(*answers: str, environment: str = "") -> list[dict[str, str]]:
    turns = [
        [{"role": "assistant", "content": text}, {"role": "environment", "content": environment}] for text in answers
    ]
    return [message for turn in turns for message in turn][:-1]


# --- rows ---


@pytest.mark.parametrize(("name", "make", "arguments"), GAMES)
def test_splits_are_reproducible_and_have_no_question_in_common(name: str, make: Any, arguments: Any) -> None:
    """Seen failing with held-out questions not excluded from training."""
    train, held_out = make("train", **arguments), make("eval", **arguments)
    assert (len(train), len(held_out)) == (300, 40)
    assert make("train", **arguments) == train
    assert len({row["question"] for row in held_out}) == 40
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}
    assert make("train", **arguments, seed=1) != train


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (guess_number.rows, {"max_number": 5, "train_size": 50, "eval_size": 11}),
        (guess_number.rows, {"max_number": 5, "train_size": 50, "eval_size": 10}),
        (gridworld.rows, {"size": 2, "walls": 2, "train_size": 50, "eval_size": 64}),
    ],
)
@pytest.mark.parametrize("split", ["train", "eval"])
def test_arguments_that_allow_too_few_games_are_told_so(make: Any, arguments: Any, split: Any) -> None:
    """1 to 5 has 10 ranges: not 11 to hold out, and nothing is left to train on beside 10."""
    if arguments["eval_size"] == 10 and split == "eval":
        assert len(make(split, **arguments)) == 10
        return
    with pytest.raises(ValueError, match=r"different held-out games and others to train on are needed, got too few"):
        make(split, **arguments)


# --- as a plug-in ---


@pytest.mark.parametrize(("name", "make", "arguments"), GAMES)
def test_a_recipe_needs_no_more_than_the_games_name(name: str, make: Any, arguments: Any) -> None:
    """Source, workflow and verifier are found by name; the rows choose the workflow, as one turn is no game."""
    config = parse_config({"data": {"source": name, "arguments": arguments}})
    prompts = load_source(config, build_char_tokenizer(PRINTABLE), "train")
    assert [(prompt.text, prompt.answer) for prompt in prompts] == [
        (row["question"], row["answer"]) for row in make("train", **arguments)
    ]
    assert {prompt.row["workflow"] for prompt in prompts} == {name}
    assert "demonstration" not in prompts[0].row
    assert name in load(name).loaded
    assert name in config.verifier.choosable


# --- demonstrations ---


@pytest.mark.parametrize(("name", "make", "arguments"), GAMES)
def test_demonstrations_are_what_the_game_answers_and_end_well(name: str, make: Any, arguments: Any) -> None:
    """Played by the workflow, the demonstrated turns get the demonstrated replies, and the episode ends with them.

    Seen failing with `<` and `>` exchanged in the bisection, and with the last reply in the demonstration.
    """
    workflows = load(name)
    for row in make("train", **arguments)[:50]:
        shown = list(row["demonstration"])
        own = [turn["content"] for turn in shown if turn["role"] == "assistant"]
        columns = {key: row[key] for key in row.keys() - {"question", "answer", "demonstration", "workflow"}}
        prompt = make_prompt(row["question"], answer=row["answer"], **columns)
        sample = play(Speaker([*own, "never"]), workflows, prompt, sampling=LONG)
        assert list(sample.messages) == shown
    assert shown[-1]["role"] == "assistant"


# --- rules ---


def test_guesses_are_answered() -> None:
    row = {"answer": "40"}
    assert asyncio.run(guess_number.step(says("50"), row)) == ("<", False)
    assert asyncio.run(guess_number.step(says("50", "30"), row)) == (">", False)
    assert asyncio.run(guess_number.step(says("30", "I say 40."), row)) == ("=", True)
    assert asyncio.run(guess_number.step(says("no idea"), row)) == ("?", False)


def test_what_counts_as_a_guess_and_as_a_move() -> None:
    """A list of all numbers is one guess, its last; digits of other scripts and endless ones are none."""
    assert [read_guess(text) for text in ("1 2 3", "007", "-5", "٣", "9" * 10, "")] == [3, 7, 5, None, None, None]
    assert [read_move(text) for text in ("U", "UP, then RIGHT", "left", "")] == ["U", "R", None, None]


def test_moves_are_answered_with_the_cell_they_go_to() -> None:
    """`S.#` over `..G`: right, right into the wall, down, right to the goal."""
    row = {"maze": "S.#/..G"}
    assert asyncio.run(gridworld.step(says("R"), row)) == (".", False)
    assert asyncio.run(gridworld.step(says("R", "R"), row)) == ("#", False)
    assert asyncio.run(gridworld.step(says("R", "R", "R", "D"), row)) == (".", False)
    assert asyncio.run(gridworld.step(says("R", "R", "D", "R"), row)) == ("G", True)
    assert asyncio.run(gridworld.step(says("U"), row)) == ("#", False)
    assert asyncio.run(gridworld.step(says("hm"), row)) == ("?", False)
    assert asyncio.run(gridworld.step(says("R", "L"), row)) == ("S", False)


# --- optimal returns ---


def test_a_goal_out_of_reach_leaves_the_cost_of_all_turns() -> None:
    assert optimal_return(read_maze("S#G"), move_cost=0.1, max_turns=4) == pytest.approx(-0.4)
    assert optimal_return(read_maze("S...G"), move_cost=0.1, max_turns=3) == pytest.approx(-0.3)
    assert optimal_return(read_maze("S...G"), move_cost=0.1, max_turns=4) == pytest.approx(0.6)


# --- verifiers ---


def score_guess(messages: Any, **options: Any) -> VerifyResult:
    return guess_number.score("1-99?", "", "40", low=1, high=99, max_turns=4, messages=messages, **options)


def test_a_right_guess_is_worth_less_the_later_it_comes() -> None:
    """0.9 ** (k - 1) for guess k; what is no guess counts as one. Seen failing with k counted from 0."""
    assert score_guess(says("40")).reward == 1.0
    assert score_guess(says("50", "hm", "40")).reward == pytest.approx(0.81)
    assert score_guess(says("50", "40"), discount=0.5).reward == 0.5
    assert score_guess(says("40", "40", "41")).reward == 1.0
    assert score_guess(says("1", "2", "3")).reward == 0.0
    assert score_guess(says("1", "2", "3", "4", "40")).reward == 0.0, "only max_turns guesses count"


def test_nothing_that_a_transcript_claims_counts() -> None:
    """Neither the model's claims nor replies that were made up, nor turns that look like replies.

    Seen failing with a verifier that looks for the reply `=` in the text.
    """
    claims = ["you won", "=", "environment: =", "\n<result>=</result>"]
    assert score_guess(says(*claims, environment="=")).reward == 0.0
    walk = gridworld.score("", "GGGG", "R", maze="S.G", max_turns=4, messages=says("G", "I won", environment="G"))
    assert walk.parts["goal"] == 0.0


def walk(maze: str, *moves: str, max_turns: int = 12, glue: str = ".") -> tuple[VerifyResult, str]:
    messages = says(*moves, environment=glue)
    completion = "".join(message["content"] for message in messages)
    return gridworld.score(f"{maze}?", completion, "", maze=maze, max_turns=max_turns, messages=messages), completion


def earned(result: VerifyResult) -> float:
    return result.reward + sum(value for _, value in result.step_rewards)


@pytest.mark.parametrize(
    ("moves", "expected"), [("RRR", 0.94), ("URRR", 0.92), ("UU", -0.04), ("RRRLU", 0.94), ("RRLRR", 0.90)]
)
def test_a_walk_earns_its_return(moves: str, expected: float) -> None:
    """`S..G`: best is 1 - 3 * 0.02 = 0.94. A bump costs as much as a move; nothing behind the goal counts."""
    result = walk("S..G", *moves)[0]
    assert earned(result) == pytest.approx(expected)
    assert result.metrics["of_optimum"] == pytest.approx(expected / 0.94)


def test_every_turns_cost_comes_where_the_turn_ends() -> None:
    """Texts `go R`, `.`, `R`, `.`, `R`: turns end at characters 4, 6 and 8. Seen failing with ends of the replies."""
    result, completion = walk("S..G", "go R", "R", "R")
    assert completion == "go R.R.R"
    assert result.step_rewards == [(4, -0.02), (6, -0.02), (8, -0.02)]
    assert result.reward == 1.0
    assert result.parts == {"goal": 1.0, "moves": pytest.approx(-0.06)}
    assert result.metrics == {"moves": 3, "of_optimum": pytest.approx(1.0)}


def test_shortest_ways_play_to_the_optimum() -> None:
    """Every demonstration earns the optimal return; `MOVES` are what the verifier reads."""
    assert set(MOVES) == set("UDLR")
    for row in gridworld.rows("train", **MAZES):
        messages = row.pop("demonstration")
        completion = "".join(message["content"] for message in messages)
        result = gridworld.score(row.pop("question"), completion, row.pop("answer"), messages=messages, **row)
        assert result.metrics["of_optimum"] == pytest.approx(1.0)
        optimum = optimal_return(read_maze(row["maze"]), move_cost=0.02, max_turns=8)
        assert earned(result) == pytest.approx(optimum)
