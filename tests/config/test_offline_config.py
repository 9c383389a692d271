"""Recipes of the offline commands: each is for one command, and every setting that would be passed over is refused."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from run_folders import new_run_folder, save_run

from areal_lite.config.offline import OfflineConfig, load_any_config
from areal_lite.config.reading import parse_section
from areal_lite.config.recipe import Config, load_config
from areal_lite.errors import CheckpointError, ConfigError
from areal_lite.launch.commands.main import main
from areal_lite.record.run_folder import RunFolder

SLIPS = {"data": {"carelessness": 0.5}}


def offline(command: str = "sft", **sections: Any) -> OfflineConfig:
    return parse_section({"command": command, **sections}, OfflineConfig)


def test_the_rlhf_recipes_are_chained_and_share_the_task() -> None:
    """Four commands in a row find each other's results."""
    sft, reward = (
        load_any_config("rlhf_sft", command="sft"),
        load_any_config("rlhf_reward_model", command="reward_model"),
    )
    dpo, ppo = load_any_config("rlhf_dpo", command="dpo"), load_config("rlhf_ppo")
    assert [recipe.model.path for recipe in (reward, dpo, ppo)] == [sft.run.dir] * 3
    assert ppo.verifier.arguments == {"model": reward.run.dir}
    assert ppo.verifier.eval_function == "last_number"
    assert all(recipe.data.arith == sft.data.arith for recipe in (reward, dpo, ppo))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["train", "rlhf_sft"], "areal-lite sft"),
        (["sft", "arith_cpu"], "areal-lite train"),
        (["reward-model", "rlhf_dpo"], "areal-lite dpo"),
    ],
)
def test_the_wrong_command_names_the_right_one(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 1
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"trainer": {"batch_size": 1, "ranks": 2}}, "every trainer rank needs a row"),
        ({"preference": {"beta": 1.0}}, "preference is not read with command=sft: remove it"),
        ({"trainer": {"minibatches": 2}}, "trainer.minibatches"),
        (
            {"command": "reward_model", **SLIPS, "preference": {"beta": 1.0}},
            "preference is not read with command=reward_model",
        ),
        ({"command": "reward_model", "trainer": {"lora": {}}}, "trainer.lora is not read with command=reward_model"),
        ({"command": "reward_model", "trainer": {"packing": True}}, "trainer.packing=True is not read"),
        ({"command": "reward_model"}, "data.carelessness makes the rejected solutions"),
        (
            {"command": "dpo", **SLIPS, "preference": {"loss": "simpo", "reference_path": "x"}},
            "preference.reference_path=x is not read with preference.loss=simpo",
        ),
        (
            {"command": "dpo", **SLIPS, "preference": {"simpo_margin": 0.1}},
            "preference.simpo_margin=0.1 is not read with preference.loss=sigmoid",
        ),
        (
            {"data": {"source": "jsonl", "path": "x", "carelessness": 0.5}},
            "data.carelessness=0.5 is not read with data.source=jsonl",
        ),
    ],
)
def test_what_cannot_be_or_would_be_passed_over_is_refused(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        offline(**raw)


def test_each_loss_has_a_beta_of_its_own() -> None:
    """Seen failing with 0.1 for all: SimPO's margin was then one of 5 nats per token."""
    losses = ({}, {"loss": "ipo"}, {"loss": "simpo"}, {"loss": "simpo", "beta": 0.3})
    recipes = [offline("dpo", **SLIPS, preference=settings) for settings in losses]
    assert [config.preference.beta for config in recipes] == [0.1, 0.1, 2.0, 0.3]
    saved = recipes[2]
    assert parse_section(saved.model_dump(), OfflineConfig) == saved


@pytest.mark.parametrize("command", ["reward-model", "reward_model"])
def test_a_recipe_may_name_its_command_as_one_types_it(command: str, tmp_path: Path) -> None:
    """Seen failing with "is a recipe of areal-lite reward-model: run it with that", said to just that command."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"command: {command}\ndata: {{carelessness: 0.5}}\n")
    assert load_any_config(str(recipe), command="reward_model").command == "reward_model"
    assert load_any_config(str(recipe)).command == "reward_model"


def test_epochs_and_steps_exclude_each_other(tmp_path: Path) -> None:
    """Seen failing with epochs winning over steps that the command line asked for."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("command: sft\ntrainer: {epochs: 2}\n")
    for load in (load_any_config, partial(load_any_config, command="sft")):
        assert load(str(recipe)).trainer.epochs == 2.0
        with pytest.raises(
            ConfigError, match=r"either run\.steps or trainer\.epochs .* got run\.steps=7 and trainer\.epochs=2: "
        ):
            load(str(recipe), ["run.steps=7"])
        assert load(str(recipe), ["run.steps=7", "trainer.epochs=null"]).run.steps == 7


def test_a_run_folder_keeps_the_recipe_and_refuses_another_command(tmp_path: Path) -> None:
    """Seen failing with every saved recipe read as one of `train`."""
    config = offline(run={"dir": str(tmp_path / "run")})
    folder = new_run_folder(config)
    save_run(folder, 3, Path.mkdir)
    assert {path.name for path in folder.newest_checkpoint().iterdir()} == {"trainer", "meta.json", "manifest.json"}
    resumed = offline(run={"resume": str(tmp_path / "run"), "steps": 7}, trainer={"epochs": 2.0})
    assert RunFolder.resume(resumed).path == folder.path
    with pytest.raises(CheckpointError, match=r"trainer\.batch_size was 32, is 16"):
        RunFolder.resume(offline(run={"resume": str(tmp_path / "run")}, trainer={"batch_size": 16}))
    with pytest.raises(CheckpointError, match="command: sft"):
        RunFolder.resume(Config.model_validate({"run": {"resume": str(tmp_path / "run")}}))
