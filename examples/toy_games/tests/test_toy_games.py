"""The built-in games: tasks, rules, verifiers that believe nothing, and optimal returns against dynamic programming."""

import random
from itertools import product
from typing import Any

import gridworld as stochastic
import numpy as np
import pytest
from episode_builders import Speaker, load, make_prompt, play

from areal_lite.config.sections import GridworldConfig, GuessConfig
from areal_lite.data.games import (
    gridworld_step,
    gridworld_tasks,
    guess_number_step,
    guess_number_tasks,
    read_guess,
    read_move,
)
from areal_lite.data.maze import MOVES, Maze, draw_maze, read_maze
from areal_lite.errors import ConfigError
from areal_lite.rollout.engine import Sampling
from areal_lite.verify.builtin.games import gridworld, guess_number, optimal_return
from areal_lite.verify.result import VerifyResult

GUESSES = GuessConfig(max_number=20, train_size=300, eval_size=40)
MAZES = GridworldConfig(size=4, walls=4, max_turns=8, train_size=300, eval_size=40)


def says(*answers: str, environment: str = "") -> list[dict[str, str]]:
    turns = [
        [{"role": "assistant", "content": text}, {"role": "environment", "content": environment}] for text in answers
    ]
    return [message for turn in turns for message in turn][:-1]


# --- tasks ---


@pytest.mark.parametrize(("make", "settings"), [(guess_number_tasks, GUESSES), (gridworld_tasks, MAZES)])
def test_splits_are_reproducible_and_have_no_prompt_in_common(make: Any, settings: Any) -> None:
    """Seen failing with held-out prompts not excluded from training."""
    train, held_out = make(settings, "train"), make(settings, "eval")
    assert (len(train), len(held_out)) == (300, 40)
    assert make(settings, "train") == train
    assert len({task.prompt for task in held_out}) == 40
    assert not {task.prompt for task in train} & {task.prompt for task in held_out}
    assert make(settings.model_copy(update={"seed": 1}), "train") != train
    assert len({task.origin for task in (*train, *held_out)}) == 340


def test_tasks_are_within_their_settings() -> None:
    for task in guess_number_tasks(GUESSES, "train"):
        assert task.prompt == f"{task.row['low']}-{task.row['high']}?"
        assert 1 <= task.row["low"] <= int(task.answer) <= task.row["high"] <= 20
        assert task.row["low"] < task.row["high"]
    for task in gridworld_tasks(MAZES, "train"):
        assert task.prompt == f"{task.row['maze']}?"
        assert task.row["maze"].count("#") == 4
        assert 1 <= len(task.answer) <= 8


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (guess_number_tasks, GuessConfig(max_number=5, train_size=50, eval_size=11)),
        (guess_number_tasks, GuessConfig(max_number=5, train_size=50, eval_size=10)),
        (gridworld_tasks, GridworldConfig(size=2, walls=2, train_size=50, eval_size=64)),
    ],
)
@pytest.mark.parametrize("split", ["train", "eval"])
def test_settings_that_allow_too_few_games_are_told_so(make: Any, settings: Any, split: Any) -> None:
    """1 to 5 has 10 ranges: not 11 to hold out, and nothing is left to train on beside 10."""
    if settings.eval_size == 10 and split == "eval":
        assert len(make(settings, split)) == 10
        return
    with pytest.raises(ConfigError, match=r"different held-out games and others to train on are needed, got too few"):
        make(settings, split)


# --- demonstrations ---


@pytest.mark.parametrize(
    ("name", "make", "settings"), [("guess_number", guess_number_tasks, GUESSES), ("gridworld", gridworld_tasks, MAZES)]
)
def test_demonstrations_are_what_the_game_answers_and_end_well(name: str, make: Any, settings: Any) -> None:
    """Played by the workflow, the demonstrated turns get the demonstrated replies, and the episode ends with them.

    Seen failing with `<` and `>` exchanged in the bisection, and with the last reply in the demonstration.
    """
    workflows = load(name)
    for task in make(settings, "train")[:50]:
        shown = list(task.demonstration)
        own = [turn["content"] for turn in shown if turn["role"] == "assistant"]
        prompt = make_prompt(task.prompt, answer=task.answer, **task.row)
        sample = play(
            Speaker([*own, "never"]), workflows, prompt, sampling=Sampling(max_new_tokens=200, temperature=1.0)
        )
        assert list(sample.messages) == shown
    assert shown[-1]["role"] == "assistant"


def test_bisection_needs_no_more_guesses_than_halvings() -> None:
    """n numbers need at most floor(log2(n)) + 1 guesses: `n.bit_length()`."""
    for task in guess_number_tasks(GuessConfig(max_number=99, train_size=500, eval_size=1), "train"):
        guesses = sum(turn["role"] == "assistant" for turn in task.demonstration)
        assert guesses <= (task.row["high"] - task.row["low"] + 1).bit_length()


# --- rules ---


def test_guesses_are_answered() -> None:
    row = {"answer": "40"}
    assert guess_number_step(says("50"), row) == ("<", False)
    assert guess_number_step(says("50", "30"), row) == (">", False)
    assert guess_number_step(says("30", "I say 40."), row) == ("=", True)
    assert guess_number_step(says("no idea"), row) == ("?", False)


def test_what_counts_as_a_guess_and_as_a_move() -> None:
    """A list of all numbers is one guess, its last; digits of other scripts and endless ones are none."""
    assert [read_guess(text) for text in ("1 2 3", "007", "-5", "٣", "9" * 10, "")] == [3, 7, 5, None, None, None]
    assert [read_move(text) for text in ("U", "UP, then RIGHT", "left", "")] == ["U", "R", None, None]


def test_moves_are_answered_with_the_cell_they_go_to() -> None:
    """`S.#` over `..G`: right, right into the wall, down, right to the goal."""
    row = {"maze": "S.#/..G"}
    assert gridworld_step(says("R"), row) == (".", False)
    assert gridworld_step(says("R", "R"), row) == ("#", False)
    assert gridworld_step(says("R", "R", "R", "D"), row) == (".", False)
    assert gridworld_step(says("R", "R", "D", "R"), row) == ("G", True)
    assert gridworld_step(says("U"), row) == ("#", False)
    assert gridworld_step(says("hm"), row) == ("?", False)
    assert gridworld_step(says("R", "L"), row) == ("S", False)


@pytest.mark.parametrize("text", ["", "S.", "G", "SG/...", "SGG", "SS.G", "S.x/..G", "S.\n..G"])
def test_what_is_no_maze_is_told_so(text: str) -> None:
    with pytest.raises(ValueError, match="a maze has rows of equal length"):
        read_maze(text)


# --- optimal returns ---


def value_iteration(maze: Maze, *, move_cost: float) -> float:
    """Return the value of the start under the best policy, by the test world's own Bellman backup, undiscounted."""
    cells = [cell for cell in product(range(len(maze.rows)), repeat=2) if maze.at(cell) in "S."]
    place = {cell: state for state, cell in enumerate(cells)}
    transitions = np.zeros((len(cells), 4, len(cells) + 1))
    rewards = np.full_like(transitions, -move_cost)
    rewards[:, :, -1] += 1.0
    for cell, state in place.items():
        for action, (down, right) in enumerate(stochastic.MOVES):
            target = (cell[0] + down, cell[1] + right)
            if maze.at(target) == "#":
                target = cell
            transitions[state, action, place.get(target, len(cells))] = 1.0
    world = stochastic.Gridworld(
        transitions_SAS=transitions, rewards_SAS=rewards, policy_SA=np.full((len(cells), 4), 0.25)
    )
    values = np.zeros(len(cells))
    for _ in range(len(cells)):
        values = world.action_values(values).max(axis=1)
    return float(values[place[maze.find("S")]])


def test_the_optimal_return_is_that_of_value_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 100 mazes of sizes 2 to 6. Seen failing with distances that count the walls' cells as free."""
    monkeypatch.setattr(stochastic, "GAMMA", 1.0)
    rng, compared = random.Random(0), 0
    while compared < 100:
        size = rng.randint(2, 6)
        maze = draw_maze(rng, size=size, walls=rng.randint(0, size * size // 2))
        if maze.find("S") not in maze.distances():
            continue
        compared += 1
        expected = value_iteration(maze, move_cost=0.02)
        assert optimal_return(maze, move_cost=0.02, max_turns=99) == pytest.approx(expected, abs=1e-12)
        assert len(maze.shortest_way()) == maze.distances()[maze.find("S")]


def test_a_goal_out_of_reach_leaves_the_cost_of_all_turns() -> None:
    assert optimal_return(read_maze("S#G"), move_cost=0.1, max_turns=4) == pytest.approx(-0.4)
    assert optimal_return(read_maze("S...G"), move_cost=0.1, max_turns=3) == pytest.approx(-0.3)
    assert optimal_return(read_maze("S...G"), move_cost=0.1, max_turns=4) == pytest.approx(0.6)


# --- verifiers ---


def score_guess(messages: Any, **options: Any) -> VerifyResult:
    return guess_number("1-99?", "", "40", low=1, high=99, max_turns=4, messages=messages, **options)


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
    walk = gridworld("", "GGGG", "R", maze="S.G", max_turns=4, messages=says("G", "I won", environment="G"))
    assert walk.parts["goal"] == 0.0


def walk(maze: str, *moves: str, max_turns: int = 12, glue: str = ".") -> tuple[VerifyResult, str]:
    messages = says(*moves, environment=glue)
    completion = "".join(message["content"] for message in messages)
    return gridworld(f"{maze}?", completion, "", maze=maze, max_turns=max_turns, messages=messages), completion


def earned(result: VerifyResult) -> float:
    return result.reward + sum(value for _, value in result.step_rewards)


@pytest.mark.parametrize(
    ("moves", "expected"),
    [("RRR", 0.94), ("URRR", 0.92), ("UU", -0.04), ("RRRLU", 0.94), ("RRLRR", 0.90)],
)
def test_a_walk_earns_its_return(moves: str, expected: float) -> None:
    """`S..G`: best is 1 - 3 * 0.02 = 0.94. A bump costs as much as a move; nothing behind the goal counts."""
    result = walk("S..G", *moves)[0]
    assert earned(result) == pytest.approx(expected)
    assert result.metrics["of_optimum"] == pytest.approx(expected / 0.94)


def test_a_walk_cut_off_by_the_turns_allowed_has_not_arrived() -> None:
    """The fourth move would; only three turns count."""
    result = gridworld("", "URRR", "", maze="S..G", max_turns=3, messages=says("U", "R", "R", "R"))
    assert result.parts["goal"] == 0.0
    assert earned(result) == pytest.approx(-0.06)


def test_every_turns_cost_comes_where_the_turn_ends() -> None:
    """Texts `go R`, `.`, `R`, `.`, `R`: turns end at characters 4, 6 and 8. Seen failing with ends of the replies."""
    result, completion = walk("S..G", "go R", "R", "R")
    assert completion == "go R.R.R"
    assert result.step_rewards == [(4, -0.02), (6, -0.02), (8, -0.02)]
    assert result.reward == 1.0
    assert result.parts == {"goal": 1.0, "moves": pytest.approx(-0.06)}
    assert result.metrics == {"moves": 3, "of_optimum": pytest.approx(1.0)}


def test_a_chat_templates_words_lie_between_the_turns() -> None:
    """`R` ends at 1, the second turn behind the template's `user` and `assistant`, at 21."""
    completion = "R\nuser\n.\nassistant\nR\nuser\n.\nassistant\nR"
    result = gridworld("", completion, "", maze="S..G", max_turns=9, messages=says("R", "R", "R", environment="."))
    ends = [end for end, _ in result.step_rewards]
    assert [completion[:end].count("R") for end in ends] == [1, 2, 3]
    assert all(completion[end - 1] == "R" for end in ends)


def test_empty_turns_cost_as_much_as_others() -> None:
    """Where no character is there to end at, in the outcome's reward. Seen failing with that cost forgotten."""
    nothing = gridworld("", "", "", maze="S.G", max_turns=9, messages=says(""))
    assert (nothing.step_rewards, earned(nothing)) == ([], pytest.approx(-0.02))
    late = gridworld("", "?R", "", maze="SG", max_turns=9, messages=says("", "R", environment="?"))
    assert [end for end, _ in late.step_rewards] == [1, 2]
    assert earned(late) == pytest.approx(0.96)


def test_a_plain_completion_is_one_turn() -> None:
    """As `areal-lite verify` has it where a file holds texts."""
    assert guess_number("1-9?", "7", "7", max_turns=3).reward == 1.0
    assert gridworld("SG?", "R", "R", maze="SG", max_turns=3).reward == 1.0


def test_a_cost_that_eats_the_goal_is_told() -> None:
    with pytest.raises(ValueError, match="move_cost must leave a way"):
        gridworld("", "R", "", maze="S.G", max_turns=3, move_cost=0.5)


def test_shortest_ways_play_to_the_optimum() -> None:
    """Every demonstration earns the optimal return; `MOVES` are what the verifier reads."""
    assert set(MOVES) == set("UDLR")
    for task in gridworld_tasks(MAZES, "train"):
        messages = list(task.demonstration)
        completion = "".join(message["content"] for message in messages)
        result = gridworld(task.prompt, completion, task.answer, messages=messages, **task.row)
        assert result.metrics["of_optimum"] == pytest.approx(1.0)
        optimum = optimal_return(read_maze(task.row["maze"]), move_cost=0.02, max_turns=8)
        assert earned(result) == pytest.approx(optimum)
