"""The library's handle: recipes, functions in their settings, and the page about them, typed as it stands."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from loop_builders import loop_config
from pages import blocks

import areal_lite
from areal_lite.config.plugins import find_function


def test_importing_it_is_light() -> None:
    """Seen failing with `from areal_lite.config.recipe import Config` at the top of api.py (pydantic)."""
    script = "import areal_lite, sys; print(*sorted({'torch', 'ray', 'vllm', 'pydantic', 'yaml'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


def test_what_is_exported_is_there_and_documented() -> None:
    for name in areal_lite.__all__:
        assert getattr(areal_lite, name).__doc__, name


@pytest.mark.parametrize("command", ["arith_cpu", "rlhf_sft", "rlhf_dpo"])
def test_a_recipe_of_any_command_is_loaded_and_changed(command: str) -> None:
    recipe = areal_lite.load_recipe(command, {"run.seed": 7})
    assert recipe.run.seed == 7
    assert areal_lite.load_recipe(recipe.model_dump()).model_dump() == recipe.model_dump()


def test_mistakes_are_config_errors() -> None:
    with pytest.raises(areal_lite.ConfigError, match="max_stalenes"):
        areal_lite.load_recipe("arith_cpu", {"queue.max_stalenes": 2})
    with pytest.raises(areal_lite.ConfigError, match="load it anew"):
        areal_lite.run(areal_lite.load_recipe("arith_cpu"), {"run.steps": 2})


def test_a_mapping_is_not_changed() -> None:
    """Seen failing with the sections not copied."""
    recipe = {"run": {"steps": 2}}
    areal_lite.load_recipe(recipe, {"run.steps": 3})
    assert recipe == {"run": {"steps": 2}}


def test_a_function_that_refers_to_others_is_found_by_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen failing (a name instead of a file) with closures named by their module."""
    monkeypatch.chdir(tmp_path)
    right = 0.25

    def verify(**_: Any) -> float:
        return right

    recipe = areal_lite.load_recipe("arith_cpu", {"verifier": {"named": {"mine": {"function": verify}}}})
    name = recipe.verifier.named["mine"].function
    assert find_function(name, kind="verifier")() == 0.25


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
    config = loop_config(loop_folder, run={"log_samples": 4, "checkpoint_every": 0})
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config.model_dump(exclude_unset=True)))
    notebook: dict[str, Any] = {"__name__": "__main__"}

    async def type_all() -> None:
        for block in blocks("api.md", "python"):
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
