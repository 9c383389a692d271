"""`areal-lite replay`: a group of a run as a conversation, scored once more."""

import json
from pathlib import Path
from typing import Any

import pytest

from areal_lite.config.recipe import parse_config
from areal_lite.launch.commands.main import main


def sample(text: str, reward: float | None, **more: Any) -> dict[str, Any]:
    return {"text": text, "reward": reward, "failure": None if reward is not None else "timeout"} | {
        "stop_reason": "stop", "tokens": 3, "spans": [[0, 0, 1], [-1, 1, 2], [1, 2, 3]], **more
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run whose verifier gives tenths, as it says in the row, and two groups."""
    verifier = tmp_path / "tenths.py"
    verifier.write_text(
        "def verify(prompt, completion, answer, tenths=10, **row):\n    return len(completion) / tenths\n"
    )
    config = parse_config({"verifier": {"function": f"{verifier}:verify"}})
    (tmp_path / "config.json").write_text(config.model_dump_json())
    said = [{"role": "assistant", "content": "hello?"}, {"role": "tool", "content": "[7]"}]
    samples = [sample("abc", 0.3, messages=said, branches=[sample("else", None)]), sample("x", None)]
    samples.append(sample("ab", 0.9, stop_reason="length"))
    rows = [
        {"step": 3, "group": f"own/0/{n}#0", "prompt": "say", "answer": "abc", "samples": samples[: 3 - n], "row": {}}
        for n in range(2)
    ]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_a_group_is_read_and_scored_once_more(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was said by whom, how old it was, and that one reward is another today. Failed samples are not scored.

    Seen failing without a word on the sample that was cut off at the token limit, and with a difference found in what
    a workflow had scored.
    """
    assert main(["replay", str(folder), "own/0/0"]) == 1
    told = capsys.readouterr().out
    assert "sample 0: reward 0.3; 1 tokens of version 0 (age 2); 1 tokens of version 1 (age 1); 1 further" in told
    assert "assistant: hello?\ntool: [7]\nbranch 1: else" in told
    assert "sample 1: failed: timeout; 1 tokens" in told
    assert "sample 2: reward 0.9; cut off at the token limit; 1 tokens" in told
    assert "sample 0: reward 0.3 then, reward 0.3 now\nsample 2: reward 0.9 then, reward 0.2 now" in told
    assert main(["replay", str(folder), "own/0/1"]) == 0
    assert "0.9" not in capsys.readouterr().out
    event = {"time": 1.0, "lane": "verify/0", "kind": "verify", "start": 0.0, "end": 1.0, "group_id": "own/0/0#0"}
    (folder / "events.jsonl").write_text(json.dumps(event | {"scored_by_workflow": [2]}) + "\n")
    assert main(["replay", str(folder), "own/0/0"]) == 0
    assert "sample 2: not scored again, its workflow scored it\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("group", "message"),
    [("own/0", "begins 2: own/0/0#0, own/0/1#0: write more of it"), ("owl/0/0#0", "did you mean own/0/0#0")],
)
def test_a_group_that_is_none_or_several_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str], group: str, message: str
) -> None:
    assert main(["replay", str(folder), group]) == 1
    assert message in capsys.readouterr().err
