"""Files that a recipe names become absolute; names that are no files stay as they are."""

from pathlib import Path
from typing import Any

import pytest

from areal_lite.config.recipe import Config, parse_config
from areal_lite.errors import ConfigError
from areal_lite.record.paths import EVALUATED, with_absolute_paths


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def resolved(raw: dict[str, Any]) -> Config:
    return with_absolute_paths(parse_config(raw), EVALUATED)


def test_verifiers_are_found_wherever_a_recipe_names_them(here: Path) -> None:
    """Seen failing with `named` left out, and with the names of a sum left out."""
    config = resolved(
        {
            "verifier": {
                "function": {"mine.py:verify": 1.0, "math": 0.5, "own": 2.0},
                "eval_function": "lib/held.py:verify",
                "named": {
                    "own": {"function": "other.py:verify"},
                    "style": {"function": "trl", "arguments": {"function": "style.py:brief", "weight": 2}},
                },
            }
        }
    ).verifier
    assert config.function == {f"{here}/mine.py:verify": 1.0, "math": 0.5, "own": 2.0}
    assert config.eval_function == f"{here}/lib/held.py:verify"
    assert config.named["own"].function == f"{here}/other.py:verify"
    assert config.named["style"].function == "trl"
    assert config.named["style"].arguments == {"function": f"{here}/style.py:brief", "weight": 2}


def test_modules_and_absolute_paths_stay(here: Path) -> None:
    config = resolved({"verifier": {"function": {"package.module:verify": 1.0, "/abs/v.py:verify": 1.0}}}).verifier
    assert config.function == {"package.module:verify": 1.0, "/abs/v.py:verify": 1.0}


def test_a_learned_reward_among_several_is_found(here: Path) -> None:
    """By its name; a missing one is named by its place in the recipe. Seen failing with `named` left out."""
    (here / "rm").mkdir()
    raw = {"verifier": {"function": {"rm": 1.0}, "named": {"rm": {"function": "reward_model"}}}}
    with pytest.raises(ConfigError, match=r"reward_model needs verifier\.named\.rm\.arguments: \{model: folder\}"):
        resolved(raw)
    raw["verifier"]["named"]["rm"]["arguments"] = {"model": "rm"}
    with pytest.raises(ConfigError, match=r"verifier\.named\.rm\.arguments\.model must be a Hugging Face model folder"):
        resolved(raw)
    (here / "rm" / "config.json").write_text("{}")
    assert resolved(raw).verifier.named["rm"].arguments == {"model": f"{here}/rm"}


def test_the_model_of_a_judge_is_a_name_even_where_a_folder_is_called_so(here: Path) -> None:
    """Seen failing with the judge treated like a user's verifier."""
    (here / "tiny").mkdir()
    arguments = {"base_url": "http://127.0.0.1:1/v1", "model": "tiny"}
    assert resolved({"verifier": {"function": "judge", "arguments": arguments}}).verifier.arguments == arguments
    assert resolved({"verifier": {"function": "v.py:f", "arguments": {"model": "tiny"}}}).verifier.arguments == {
        "model": f"{here}/tiny"
    }


def test_data_of_every_source_is_found_and_hub_ids_stay(here: Path) -> None:
    """A hub id is one unless there is such a folder. Seen failing with `mix` left out, and with ids made paths."""
    (here / "owner" / "local").mkdir(parents=True)
    mix = {
        "file": {"source": "jsonl", "path": "a.jsonl", "eval_path": "b.jsonl"},
        "hub": {"source": "dataset", "path": "owner/name"},
        "folder": {"source": "dataset", "path": "owner/local"},
    }
    config = resolved({"data": {"mix": mix}}).data
    paths = {name: (source.path, source.eval_path) for name, source in config.mix.items()}
    assert paths["file"] == (f"{here}/a.jsonl", f"{here}/b.jsonl")
    assert paths["hub"] == ("owner/name", None)
    assert paths["folder"] == (f"{here}/owner/local", None)


def test_workflows_and_the_functions_they_are_given_are_found(here: Path) -> None:
    """Seen failing with `workflow_arguments`, and with `workflows`, left out."""
    config = resolved(
        {
            "rollout": {
                "workflow": "multi_turn",
                "workflow_arguments": {"step": "game.py:step", "max_turns": 3, "words": "say: no.py"},
                "workflows": {
                    "own": {"function": "own.py:episode", "arguments": {"functions": ["tools.py:add", "pkg.mod:sub"]}}
                },
            }
        }
    ).rollout
    assert config.workflow == "multi_turn"
    assert config.workflow_arguments == {"step": f"{here}/game.py:step", "max_turns": 3, "words": "say: no.py"}
    assert config.workflows["own"].function == f"{here}/own.py:episode"
    assert config.workflows["own"].arguments == {"functions": [f"{here}/tools.py:add", "pkg.mod:sub"]}
    assert resolved({"rollout": {"workflow": "own.py:episode"}}).rollout.workflow == f"{here}/own.py:episode"


def test_own_losses_and_advantages_are_found(here: Path) -> None:
    """Seen failing with the mark inside `FunctionName | None`, where pydantic does not show it."""
    own = {"loss_function": "mine.py:loss", "advantage_function": "mine.py:advantage"}
    objective = with_absolute_paths(parse_config({"objective": own}), ["objective"]).objective
    assert objective.loss_function == f"{here}/mine.py:loss"
    assert objective.advantage_function == f"{here}/mine.py:advantage"
