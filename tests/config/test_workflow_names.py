"""Workflows as recipes and data rows name them: loading, checks at the start, evaluation."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from episode_builders import Speaker, load, make_prompt, play, run

from areal_lite.errors import EpisodeError, PluginError
from areal_lite.rollout.runner import complete_greedily

HERE = "test_workflow_names"

Messages = Sequence[Mapping[str, str]]


def larger(messages: Messages, row: Mapping[str, Any]) -> tuple[str, bool]:
    """An environment that answers `>>` forever."""
    return ">>", False


async def raises(engine: Any, row: Mapping[str, Any]) -> list[Any]:
    raise KeyError("level")


# --- loading ---


def test_a_workflow_comes_from_a_file_and_gets_row_and_arguments(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "async def episode(engine, row, *, times):\n"
        "    segments, context = [], list(engine.prompt_ids)\n"
        "    for _ in range(times):\n"
        "        segments.append(await engine.generate(context))\n"
        "        segments.append(engine.given(row['answer'] + row['prompt'] + str(sorted(row))))\n"
        "        context += [*segments[-2].token_ids, *segments[-1].token_ids]\n"
        "    return segments\n"
    )
    workflows = load(f"{tmp_path / 'mine.py'}:episode", arguments={"times": 2})
    prompt = make_prompt("7?", answer="x", level=1, verifier="math", workflow=None)
    assert play(Speaker(["a", "b"]), workflows, prompt).text == "ax7?['answer', 'level', 'prompt']b"


def test_a_row_chooses_among_known_workflows_and_those_of_the_recipe() -> None:
    """A name of the recipe's wins over a known one; anything else is refused, code above all."""
    workflows = load(
        workflows={"twice": {"function": "multi_turn", "arguments": {"step": f"{HERE}:larger", "max_turns": 2}}}
    )
    assert play(Speaker(["a", "b"]), workflows, make_prompt(workflow="twice")).text == "a>>b"
    assert play(Speaker(["a", "b"]), workflows, make_prompt()).text == "a"
    game = make_prompt(workflow="guess_number", answer="5", max_turns=2)
    assert play(Speaker(["3", "5"]), workflows, game).text == "3>5"
    for name in (f"{HERE}:raises", "guess", 3):
        with pytest.raises(
            EpisodeError, match=r"workflow:PluginError: a column workflow must name one of .*\bgridworld\b"
        ):
            play(Speaker(["a"]), workflows, make_prompt(workflow=name))


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"workflow": f"{HERE}:larger"}, r"a workflow must be an async function, got 'test_workflow_names:larger'"),
        ({"workflows": {"own": {"function": "no_module_at_all:f"}}}, r"'no_module_at_all:f' cannot be imported"),
        ({"workflow": "tools", "workflow_arguments": {"functions": []}}, r"functions must be a list of names"),
    ],
)
def test_a_workflow_that_cannot_run_fails_the_start(rollout: dict[str, Any], message: str) -> None:
    """Also one that only rows may choose, and an environment that is only needed in its second turn."""
    with pytest.raises(PluginError, match=message):
        load(**rollout)


# --- evaluation ---


def test_evaluation_plays_greedily_and_survives_a_failed_episode() -> None:
    """No seeds, temperature 0; the failed one is None. Seen failing with its error raised."""
    arguments = {"step": f"{HERE}:larger", "max_turns": 3}
    workflows = load("multi_turn", arguments=arguments, workflows={"own": {"function": f"{HERE}:raises"}})
    engine = Speaker(lambda context: "ab")
    prompts = [make_prompt(), make_prompt(workflow="own"), make_prompt()]
    samples = run(lambda: complete_greedily(engine, prompts, max_new_tokens=50, workflows=workflows))
    assert [sample and sample.text for sample in samples] == ["ab>>ab>>ab", None, "ab>>ab>>ab"]
    assert {(sampling.temperature, sampling.seed) for sampling in engine.samplings} == {(0.0, None)}
