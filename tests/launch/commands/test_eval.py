"""`areal-lite eval` without vLLM: a scripted engine, the real verifier pool, and waits that end (invariant I6)."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine

from areal_lite.config.recipe import Config, parse_config
from areal_lite.errors import StallError
from areal_lite.launch.commands.eval import _run
from areal_lite.launch.commands.main import main
from areal_lite.launch.commands.trial import Case
from areal_lite.record.run_folder import RunFolder
from areal_lite.rollout.vllm_engine import VllmEngine
from areal_lite.types import Prompt
from areal_lite.verify.protocol import Reply, failed

VERIFY = """
import time
from areal_lite.verify import VerifyResult

def verify(prompt, completion, answer, **row):
    time.sleep(float(answer))
    return VerifyResult(len(completion.split()), step_rewards=[(1, 0.5)])
"""


def run(engine: ScriptedEngine, folder: Path, monkeypatch: pytest.MonkeyPatch, *, seconds: str) -> list[Case]:
    """Evaluate six prompts, whose scores take so many seconds each, with a stall timeout of three."""

    async def start(*_: Any, **__: Any) -> ScriptedEngine:
        return engine

    monkeypatch.setattr(VllmEngine, "start", start)
    (folder / "slow.py").write_text(VERIFY)
    config = parse_config(
        {
            "run": {"stall_timeout_s": 3.0},
            "rollout": {"max_new_tokens": 3},
            "verifier": {"function": f"{folder / 'slow.py'}:verify", "timeout_s": 60.0},
        }
    )
    rows: list[dict[str, Any]] = [{}, {"max_new_tokens": 1}] * 3
    prompts = [
        Prompt(prompt_id=f"eval/0/{index}", text="12", token_ids=(1,), answer=seconds, row=row)
        for index, row in enumerate(rows)
    ]

    async def limited() -> list[Case]:
        async with asyncio.timeout(60):
            return await _run(config, prompts, model_folder="unused")

    return asyncio.run(limited())


@pytest.mark.slow
def test_an_evaluation_scores_every_prompt_within_its_own_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together it takes longer than the stall timeout, which counts from the last progress."""
    engine = ScriptedEngine(eos_id=99)
    replies = [case.reply for case in run(engine, tmp_path, monkeypatch, seconds="0.6")]
    assert [reply and reply.total for reply in replies] == [3.5, 1.5] * 3
    assert engine.calls == ["close"]


@pytest.mark.slow
def test_an_engine_that_stands_still_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And closed. Seen failing, by the test's own timeout, without a watchdog."""
    engine = ScriptedEngine(eos_id=99)
    asyncio.run(engine.pause("recompute"))
    with pytest.raises(StallError, match=r"for 6 completions and scores .*; late: the engine, after 0 tokens, or"):
        run(engine, tmp_path, monkeypatch, seconds="0")
    assert engine.calls[1:] == ["close"]


@pytest.mark.slow
def test_a_verifier_that_stands_still_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within `verifier.timeout_s`. Seen failing without a watchdog."""
    with pytest.raises(StallError, match=r"for 6 .*; late: .*, or the verifier, with 1 calls running and 5 waiting"):
        run(ScriptedEngine(eos_id=99), tmp_path, monkeypatch, seconds="50")


def cases(*replies: Reply) -> list[Case]:
    prompt = Prompt(prompt_id="eval/0/0", text="1+1", token_ids=(), answer="2")
    return [Case(index=n, prompt=prompt, completion=f"c{n}", reply=reply) for n, reply in enumerate(replies)]


def test_a_run_s_figure_keeps_its_name_and_scores_are_shown_as_verify_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen failing as an accuracy, where no half point was left at the end of a run that had some."""
    replies = [Reply(1.0, parts={"right": 1.0}), Reply(0.0, metrics={"no_hash": 1.0}), failed("timeout", "slow.py:3")]
    monkeypatch.setattr("areal_lite.launch.commands.eval.evaluate", lambda *_, **__: cases(*replies))
    (tmp_path / "summary.json").write_text('{"eval_called": "mean reward"}')
    assert main(["eval", str(tmp_path), "--recipe", "arith_cpu"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("held-out mean reward, greedy: 0.500, 95 % interval 0.095 to 0.905 (2 problems, 1 could")
    for shown in ("right", "no_hash", "1 failed: timeout\nfirst at row 2, completion c2\nslow.py:3", "lowest scores"):
        assert shown in output
    assert main(["eval", "nowhere", "--recipe", "arith_cpu"]) == 0
    assert capsys.readouterr().out.startswith("held-out accuracy, greedy: 0.500")


def test_a_model_of_a_run_is_measured_with_the_run_s_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the command prints it. Seen failing with the folder itself alone, JSON read as YAML, and a run of `dpo`.

    The same when it is served. Seen failing with the demo's recipe: a context of 96 tokens.
    """
    seen: list[Config] = []

    def evaluate(config: Config, **_: Any) -> list[Case]:
        seen.append(config)
        return cases(Reply(1.0))

    async def serve(config: Config, *_: Any, **__: Any) -> None:
        seen.append(config)

    monkeypatch.setattr("areal_lite.launch.commands.eval.evaluate", evaluate)
    monkeypatch.setattr("areal_lite.launch.commands.serve.serve_model", serve)
    monkeypatch.setattr("areal_lite.record.paths.find_model_folder", lambda model, **_: Path(model))
    model = tmp_path / "run" / "checkpoints" / "step-3" / "model"
    model.mkdir(parents=True)
    folder, verifier = RunFolder(tmp_path / "run"), {"function": "exact", "arguments": {"tiny": 1e-05}}
    folder.write_json("config.json", parse_config({"verifier": verifier, "model": {"max_context": 177}}).model_dump())
    folder.write_json("summary.json", {"eval_called": "mean reward"})
    for given in (tmp_path / "run", model):
        assert main(["eval", str(given), "data.eval_size=3"]) == 0
        config, lines = seen.pop(), capsys.readouterr().out.splitlines()
        assert (config.model.max_context, config.data.eval_size) == (177, 3)
        assert config.verifier.arguments == {"tiny": 1e-05}
        assert lines[0] == f"recipe: {folder.path}/config.json"
        assert lines[1].startswith("held-out mean reward, greedy: 1.000, ")
        assert main(["serve", str(given), "rollout.slots=3"]) == 0
        assert capsys.readouterr().out == f"recipe: {folder.path}/config.json\n"
        config = seen.pop()
        assert (config.model.max_context, config.rollout.slots) == (177, 3)
    folder.write_json("config.json", {"command": "dpo"})
    for given in (tmp_path / "run", tmp_path):
        assert main(["eval", str(given)]) == 1
        assert f"--recipe must name the settings to use, got none, and {given} belongs" in capsys.readouterr().err
    assert seen == []


def test_a_model_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Seen failing: a recipe was asked for."""
    assert main(["eval", "nothere"]) == 1
    assert "MODEL_OR_RUN" in (error := capsys.readouterr().err)
    assert "--recipe" not in error


def test_two_evaluations_are_compared_row_by_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows 0 to 3 went from 0, 0, 1, 1 to 1, 1, 1, 0; row 4 was scored once. 0.25 +- 1.96 * 0.957 / 2 by hand.

    Seen failing with the interval of two independent means, with the row that failed counted as 0, and with one
    completion of several that `verify` had scored.
    """
    monkeypatch.setattr("areal_lite.record.paths.find_model_folder", lambda model, **_: Path(model))
    for name, rewards in (("a", (0, 0, 1, 1, 1)), ("b", (1, 1, 1, 0, None))):
        replies = [failed("timeout", "late") if one is None else Reply(float(one)) for one in rewards]
        monkeypatch.setattr("areal_lite.launch.commands.eval.evaluate", lambda *_, r=replies, **__: cases(*r))
        out = tmp_path / f"{name}.json"
        assert main(["eval", "m", "--recipe", "arith_cpu", "--json", str(out)]) == 0
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["reward"]["interval"] == pytest.approx([0.2307, 0.8824], abs=1e-4)  # Wilson's, of 3 in 5
    assert [(row["completion"], row["reward"]) for row in content["results"]][:2] == [("c0", 0.0), ("c1", 0.0)]
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    capsys.readouterr()
    assert main(["eval", "--compare", *files]) == 0
    output = capsys.readouterr().out
    assert "0.500 → 0.750: +0.250, 95 % interval -0.688 to +1.188 (4 rows in pairs: 2 better, 1 worse)" in output
    assert "1 rows were left out" in output
    assert output.index("1 → 0") < output.index("0 → 1")
    content["results"] += content["results"][:1]  # as `verify` writes it
    (tmp_path / "b.json").write_text(json.dumps(content))
    assert main(["eval", "--compare", *files]) == 1
    assert "needs one completion a row, got 6 of 5 rows" in capsys.readouterr().err
    (tmp_path / "b.json").write_text('{"results": [{"index": "0"}]}')
    assert main(["eval", "--compare", *files]) == 1
    assert "--compare must name files that areal-lite eval --json wrote, got" in capsys.readouterr().err
