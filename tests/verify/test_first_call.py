"""A verify function of the user's, called before a run starts: which failures end it there, and who is not called."""

from pathlib import Path
from typing import Any

import pytest

from areal_lite.config.recipe import parse_config
from areal_lite.errors import VerifierError
from areal_lite.types import Prompt
from areal_lite.verify.first_call import check_first_calls

SOURCE = """
import os, time
from areal_lite.verify import VerifierUnavailable, batched, prepared_by

def good(prompt, completion, answer, *, told="", **row):
    assert (prompt, completion, answer, row, told) == (f"{answer}+0=?", answer, answer, {"level": 3}, "so")
    return float(os.environ["TOLD"])

def typo(prompt, completion, answer, **row):
    return look_up(row)

def look_up(row):
    return row["levle"]

async def typo_async(prompt, completion, answer, **row):
    return look_up(row)

def narrow(prompt, completion, answer):
    return 1.0

def silent(prompt, completion, answer, **row):
    print("scored")

@batched(4)
def one_for_all(prompts, completions, answers, rows):
    return 1.0

def hangs(prompt, completion, answer, **row):
    time.sleep(60)

def ends(prompt, completion, answer, **row):
    os._exit(7)

def fussy(prompt, completion, answer, **row):
    if answer != "3":
        raise ValueError(answer)
    return 1.0

def away(prompt, completion, answer, **row):
    raise VerifierUnavailable("no answer")

def chatty(completions, level, **columns):
    return [float(completion[-1]["content"] == "0") for completion in completions]

def plain(completions, **columns):
    return [float(completion.strip() == "0") for completion in completions]

class Keeps:
    def __call__(self, *texts, **row):
        raise RuntimeError("keeps")

class Loads:
    def __init__(self):
        raise RuntimeError("the start says it")
"""


def prompts(**row: Any) -> list[Prompt]:
    return [
        Prompt(prompt_id=f"train/0/{n}", text=f"{n}+0=?", token_ids=(), answer=str(n), row={"level": 3, **row})
        for n in range(20)
    ]


def call(folder: Path, name: str, /, *, row: Any = {}, sections: Any = {}, **verifier: Any) -> str:  # noqa: B006
    """Return what the error says; nothing where there is none."""
    (folder / "rules.py").write_text(SOURCE)
    chosen = {"function": f"{folder}/rules.py:{name}", "timeout_s": 30.0, **verifier}
    config = parse_config({"run": {"env": {"TOLD": "1"}}, **sections, "verifier": chosen})
    try:
        check_first_calls(config, prompts(**row))
    except VerifierError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["good", "fussy", "away", "Loads"])
def test_a_rule_that_scores_a_row_or_cannot_be_loaded_passes(name: str, tmp_path: Path) -> None:
    """`fussy` likes the fourth row alone. Seen failing with one row, and with each of the others called and believed.

    `good` wants what it gets in a run. Seen failing without `run.env`, and with the columns that no verifier gets.
    """
    wanted: Any = {"arguments": {"told": "so"}, "row": {"verifier": "", "workflow": "single_turn"}}
    assert call(tmp_path, name, **(wanted if name == "good" else {})) == ""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("typo", ["exception:KeyError\nTraceback", "rules.py", "in typo", "in look_up", "KeyError: 'levle'"]),
        ("typo_async", ["exception:KeyError\nTraceback", "in typo_async", "in look_up"]),
        ("narrow", ["exception:TypeError\nTypeError: narrow() got an unexpected keyword argument 'level'\n"]),
        ("silent", ["wrong_type:NoneType\nexpected the reward: a number, or areal_lite.verify.VerifyResult("]),
        ("one_for_all", ["wrong_type:float\nexpected a list, as the function is @batched"]),
        ("ends", ["it ended with crashed\nexit code 7"]),
        ("Keeps", ["exception:RuntimeError\nTraceback", "RuntimeError: keeps"]),
    ],
)
def test_a_rule_that_fails_at_every_row_is_told_with_its_own_frames(
    name: str, words: list[str], tmp_path: Path
) -> None:
    """And with the row. Seen failing with the frames of the caller before the user's."""
    said = call(tmp_path, name)
    assert said.startswith(f"the verifier {tmp_path}/rules.py:{name} failed before the run started:")
    assert "first, for the prompt '0+0=?' and the completion '0', it ended with " in said
    assert all(word in said for word in words), said
    assert "protocol.py" not in said


def test_a_rule_that_hangs_is_told_within_its_own_deadline(tmp_path: Path) -> None:
    """Seen failing with every row waited for."""
    assert "timeout\nafter 0.5 s" in call(tmp_path, "hangs", timeout_s=0.5)


@pytest.mark.parametrize(
    "options",
    [
        {"max_failure_share": 1.0},
        {"row": {"verifier": "exact"}},
        {"row": {"workflow": "multi_turn"}},
        {"sections": {"rollout": {"workflow_command": "true"}}},
        {"function": "reasoning_gym"},
    ],
)
def test_what_a_run_would_not_end_for_or_calls_otherwise_is_not_called(options: Any, tmp_path: Path) -> None:
    """Seen failing with each of them called."""
    assert call(tmp_path, "typo", **options) == ""


def test_every_rule_of_a_recipe_is_called_with_its_own_rows(tmp_path: Path) -> None:
    """Members of a sum, and what rows choose. Seen failing with the first alone."""
    typo = {"function": f"{tmp_path}/rules.py:typo"}
    assert "rules.py:typo failed" in call(tmp_path, "", function={"exact": 1.0, typo["function"]: 1.0})
    assert "rules.py:typo failed" in call(tmp_path, "", function="exact", named={"x": typo}, row={"verifier": "x"})
    assert call(tmp_path, "", function="exact", named={"x": typo}) == ""


def test_the_function_behind_an_adapter_is_called_as_it_will_be(tmp_path: Path) -> None:
    """Seen failing with known names left out, with texts for a chat, and with the adapter's name for the function's."""
    chat, plain = {"prompt_messages": [{"role": "user", "content": "0+0"}]}, f"{tmp_path}/rules.py:plain"

    def said(name: str, row: Any, **arguments: Any) -> str:
        arguments["function"] = f"{tmp_path}/rules.py:{name}"
        return call(tmp_path, "", function="trl", row=row, arguments=arguments)

    assert said("chatty", chat) == said("plain", {}) == said("plain", chat, chat=False) == ""
    words = said("plain", chat)
    assert words.startswith(f"the verifier {plain} failed before the run started:")
    assert "AttributeError: 'list' object has no attribute 'strip'" in words
    assert words.endswith("; over chats `trl` passes messages, and texts with its argument chat: false")
    assert "TypeError: string indices must be integers" in said("chatty", {})
