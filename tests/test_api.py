"""The library's handle: recipes, functions in their settings, and the page about them, typed as it stands."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from loop_builders import loop_config, write_recipe
from pages import blocks

import areal_lite
from areal_lite.config.plugins import find_function
from areal_lite.data.prompts import load_source
from areal_lite.data.tokenizer import build_char_tokenizer
from areal_lite.record.run_files import read_rows
from areal_lite.rollout.runner import load_workflows
from areal_lite.rollout.vllm_engine import check_engine_arguments


def test_importing_it_is_light() -> None:
    """Seen failing with `from areal_lite.config.recipe import Config` at the top of api.py (pydantic)."""
    script = "import areal_lite, sys; print(*sorted({'torch', 'ray', 'vllm', 'pydantic', 'yaml'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == []


def test_what_is_exported_is_there_and_documented() -> None:
    for name in areal_lite.__all__:
        assert getattr(areal_lite, name).__doc__, name


@pytest.mark.parametrize("command", ["arith_cpu", "rlhf_sft", "rlhf_dpo"])
def test_a_recipe_of_any_command_is_loaded_and_changed(command: str) -> None:
    recipe = areal_lite.load_recipe(command, {"run.seed": 7})
    assert recipe.run.seed == 7
    assert areal_lite.load_recipe(recipe.model_dump()).model_dump() == recipe.model_dump()


def test_what_is_easily_tried_is_answered_and_no_traceback() -> None:
    """Seen failing with AttributeErrors, pydantic's ValidationError, and a recipe's text taken for a file's name."""
    recipe: Any = areal_lite.load_recipe("arith_cpu")
    wrong: Any = ["run.steps=3"]
    with pytest.raises(areal_lite.ConfigError, match="max_stalenes"):
        areal_lite.load_recipe("arith_cpu", {"queue.max_stalenes": 2})
    with pytest.raises(areal_lite.ConfigError, match="load it with them"):
        areal_lite.run(recipe, {"run.steps": 2})
    with pytest.raises(areal_lite.ConfigError, match=r'expected a mapping, got list\. Fix: write \{"run.steps": 20\}'):
        areal_lite.load_recipe("arith_cpu", wrong)
    with pytest.raises(areal_lite.ConfigError, match=r"got Config\. Fix: .* model_dump\(\)"):
        areal_lite.load_recipe(recipe, {"run.steps": 3})
    with pytest.raises(areal_lite.ConfigError, match=r"steps was not set: .* never changes\. Fix: load it again"):
        recipe.run.steps = 3
    with pytest.raises(areal_lite.ConfigError, match="run was not set"):
        recipe.run = {}
    assert recipe.model_copy(update={"run": None}).run is None


@pytest.mark.parametrize("function", [len, dict, str.upper])
def test_a_function_of_python_itself_has_a_name_too_however_deep_it_is_set(
    function: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen failing: the module `builtins` has no file."""
    monkeypatch.chdir(tmp_path)
    recipe: Any = areal_lite.load_recipe(
        "arith_cpu", {"verifier.function": function, "verifier.named": {"mine": {"function": function}}}
    )
    for verifier in (recipe.verifier, recipe.verifier.named["mine"]):
        assert find_function(verifier.function, kind="verifier") is function


def test_functions_in_lists_and_as_keys_get_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing with an AttributeError, and with lambdas refused where a name without a colon was a library's."""
    monkeypatch.chdir(tmp_path)

    def add(a: int) -> int:
        return a + 1

    tools = {"workflow": "tools", "workflow_arguments": {"functions": [add]}, "tool_parser": add}
    recipe: Any = areal_lite.load_recipe({"verifier": {"function": {add: 1.0, len: 0.5}}, "rollout": tools})
    first, second = recipe.verifier.weights
    assert find_function(first, kind="verifier")(1) == 2
    assert find_function(second, kind="verifier") is len
    assert recipe.rollout.workflow_arguments["functions"] == [first]
    check_engine_arguments(recipe)
    assert load_workflows(recipe)


def test_rows_in_memory_are_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As overrides and in a mapping; what trains is what was given. Seen failing: `input should be a valid string`."""
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(4)]
    changes = {"data.source": "jsonl", "data.path": rows, "data.eval_path": rows[:1]}
    recipe: Any = areal_lite.load_recipe("arith_cpu", changes)
    assert [prompt.text for prompt in load_source(recipe, build_char_tokenizer("0123456789+="), "train")] == [
        row["question"] for row in rows
    ]
    again: Any = areal_lite.load_recipe({"data": {"source": "jsonl", "path": tuple(rows)}})
    assert again.data.path == recipe.data.path
    assert read_rows(Path(recipe.data.eval_path))[0] == rows[:1]
    for odd in ([], [1], [{"question": object()}], [{"question": float("nan")}]):
        with pytest.raises(areal_lite.ConfigError, match=r"data\.path: the rows were not written: .* Fix: convert"):
            areal_lite.load_recipe("arith_cpu", {"data.source": "jsonl", "data.path": odd})


def test_a_quiet_run_prints_nothing_in_a_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where rich shows everything in the cell, whatever file it was given. Seen failing with the file alone."""
    shown: list[str] = []

    def train(config: Any, *, console: Any, **_: Any) -> dict[str, Any]:
        console.print("a step")
        return {"folder": str(tmp_path)}

    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda segments, text: shown.append(text))
    monkeypatch.setattr("areal_lite.launch.run.train.train", train)
    areal_lite.run("arith_cpu", quiet=True)
    assert (shown, capsys.readouterr().out) == ([], "")
    areal_lite.run("arith_cpu")
    assert shown == ["a step\n"]


def test_a_mapping_is_not_changed() -> None:
    """Seen failing with the sections not copied."""
    recipe = {"run": {"steps": 2}}
    areal_lite.load_recipe(recipe, {"run.steps": 3})
    assert recipe == {"run": {"steps": 2}}


def test_a_folder_without_a_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(areal_lite.ConfigError, match=r"config\.json"):
        areal_lite.open_run(tmp_path)


@pytest.mark.loop
def test_the_page_runs_as_it_stands(
    ray_cluster: None, loop_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks in one notebook, inside a running event loop, with a tiny recipe in place of the demo's.

    Seen failing with `on_step` never called, and with its answer ignored.
    """
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path / "tiny.yaml", loop_config(loop_folder, run={"log_samples": 4, "checkpoint_every": 0}))
    notebook: dict[str, Any] = {"__name__": "__main__"}

    async def type_all() -> None:
        for block in (block for block in blocks("first.md", "python") if block.file is None):
            exec(block.text.replace('"arith_cpu"', '"tiny.yaml"'), notebook)

    asyncio.run(type_all())
    assert notebook["recipe"].queue.max_staleness == 1
    run = notebook["run"]
    assert run.summary["status"] == "interrupted"
    assert notebook["steps"] in ([1, 2], [1, 2, 3])
    assert notebook["rewards"] == [row["reward_mean"] for row in run.metrics]
    groups = run.samples
    assert len(groups) == 4 * len(notebook["steps"])
    for group in groups:
        for sample in group["samples"]:
            expected = notebook["ends_with_answer"](group["prompt"], sample["text"], group["answer"])
            assert sample["reward"] == pytest.approx(expected)
    assert any(len(sample["text"]) > 0 for group in groups for sample in group["samples"])
    assert (run.model / "config.json").is_file()
    assert run.model.is_relative_to(run.checkpoints[-1])
