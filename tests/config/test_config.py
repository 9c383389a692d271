"""Recipes: what is shipped parses, and every mistake is one error that names field, value and remedy."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from areal_lite.config.checks import core_warning
from areal_lite.config.offline import OfflineConfig, load_any_config, parse_any_config
from areal_lite.config.reading import (
    override,
    parse_override,
    parse_section,
    recipe_folder,
    shipped_recipes,
)
from areal_lite.config.recipe import PARITY_LIMITS, Config, load_config, parse_config
from areal_lite.errors import ConfigError
from areal_lite.launch.commands.main import main

GPU = {"run": {"device": "cuda"}, "weights": {"transport": "nccl"}}
SERVER = "http://10.0.0.5:8000"
IPC = {"run": {"device": "cuda"}, "weights": {"transport": "ipc"}}
EVALUATED = {"run": {"eval_every": 5}}
WATCHED = {"reward_watch": {"verifiers": {"truth": {"function": "math"}}}}


def error_of(raw: Mapping[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(raw)
    return str(caught.value)


def assert_refused(raw: dict[str, Any], words: list[str]) -> None:
    """In one line that has these words."""
    message = error_of(raw)
    assert [word for word in words if word not in message] == []
    assert len(message.splitlines()) == 1


def fields_of(section: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Dotted name and description of every setting that is not a section."""
    found: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= fields_of(field.annotation, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = " ".join((field.description or "").split())
    return found


# --- recipes ---


def test_a_collective_may_take_longer_than_a_stall_or_nobody_knows_who_is_late() -> None:
    """Seen failing without the check."""
    run, trainer = {"stall_timeout_s": 700}, {"ranks": 2}
    words = ["trainer.collective_timeout_s must be more than run.stall_timeout_s=700, got 600"]
    assert_refused({"run": run, "trainer": trainer}, words)
    parse_config({"run": run, "trainer": {"ranks": 1}})
    parse_config({"run": run, "trainer": trainer | {"collective_timeout_s": 800}})


@pytest.mark.parametrize(
    ("settings", "limit"),
    [({}, 0.003), ({"parity_limit": 0.2}, 0.2), ({"parity_limit": 0}, 0.0), ({"parity_limit": None}, 0.0)],
)
def test_the_limit_of_parity_is_that_of_the_dtype_unless_the_recipe_has_its_own(
    settings: dict[str, Any], limit: float
) -> None:
    config = parse_config({"weights": settings})
    assert (config.parity_limit(), config.parity_limit(is_mixture=True)) == (limit, limit)
    assert "parity_limit" in error_of({"weights": {"parity_limit": -1}})


def test_a_mixture_in_bfloat16_and_an_engine_in_fp8_have_limits_of_their_own() -> None:
    """Of a quantisation that nobody has calibrated the recipe names the limit.

    Seen failing with the limit of the dtype for all.
    """
    model, fp8 = {"compute_dtype": "bfloat16"}, {"engine_arguments": {"quantization": "fp8"}}
    plain = parse_config({"model": model})
    assert plain.parity_limit() == PARITY_LIMITS["bfloat16"]
    assert plain.parity_limit(is_mixture=True) == PARITY_LIMITS["experts"]
    on_gpu = {**GPU, "rollout": {"replay_routes": True}}
    assert parse_config({"model": model, **on_gpu}).parity_limit(is_mixture=True) == PARITY_LIMITS["bfloat16"]
    assert parse_config({"model": model, "rollout": fp8}).parity_limit() == PARITY_LIMITS["fp8"]
    other = {"engine_arguments": {"quantization": "awq"}}
    assert_refused({"rollout": other}, ["parity_limit must be a number with rollout.engine_arguments quantization=awq"])
    assert parse_config({"rollout": other, "weights": {"parity_limit": 0.5}}).parity_limit() == 0.5


@pytest.mark.parametrize(("found", "expected"), [("AMX", "bfloat16"), ("", "float32")])
def test_native_is_decided_where_the_recipe_is_read(found: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it is bfloat16 whatever the CPU has. Seen failing with the dtype looked up where it is used."""
    monkeypatch.setattr("areal_lite.config.sections.bfloat16_instructions", lambda: found)
    config = parse_config({"model": {"compute_dtype": "native"}})
    assert config.compute_dtype == expected
    assert parse_config({"model": {"compute_dtype": "native"}, **GPU}).compute_dtype == "bfloat16"
    monkeypatch.setattr("areal_lite.config.sections.bfloat16_instructions", lambda: "AMX")
    assert parse_config(config.model_dump()).compute_dtype == expected, "a resume keeps the dtype"


def test_every_setting_says_what_it_means() -> None:
    """Seen failing with a `Field` without description."""
    described = fields_of(Config) | fields_of(OfflineConfig)
    assert [name for name, description in described.items() if not description] == []


def test_an_empty_section_has_its_defaults(tmp_path: Path) -> None:
    """All of its lines may be commented out. Seen failing without `_fill_empty`, and with `setdefault` in overrides."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("run:\n  # steps: 3\ndata:\n")
    assert load_config(str(recipe)) == parse_config({})
    assert load_config(str(recipe), ["run.steps=3", "data.arith.seed=4"]).data.arith.seed == 4


# --- files that are no recipes ---


def test_a_missing_recipe_names_the_shipped_ones_and_the_nearest() -> None:
    """Seen failing without the suggestion."""
    with pytest.raises(ConfigError, match=r"arith_cpu, .*there is no 'arith_gpu'; did you mean arith_cpu\?"):
        load_config("arith_gpu")


@pytest.mark.parametrize(
    "content",
    [b"run: {steps: 3", b"run: steps: 3", b"\xff\xfe\x00", b"a: !!python/object:os.system {}", b"a: {t: {{p}}}"],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    """Seen failing with `UnicodeDecodeError` and, for a mapping as a key, `TypeError` not caught."""
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.yaml is not readable as YAML"):
        load_config(str(path))


# --- unknown keys and wrong values ---


@pytest.mark.parametrize(
    ("raw", "nearest"),
    [
        ({"rolout": {"workers": 2}}, "rollout"),
        ({"queue": {"max_stalenes": 2}}, "queue.max_staleness"),
        ({"trainer": {"temperature": 1.0}}, "rollout.temperature"),
        ({"data": {"arith": {"min_term": 2}}}, "data.arith.min_terms"),
        ({"trainer": {"learning_rate": 1e-3}}, None),
    ],
)
def test_an_unknown_key_names_the_nearest(raw: dict[str, Any], nearest: str | None) -> None:
    """Seen failing with suggestions looked for among the section's own keys only."""
    message = error_of(raw)
    assert message.startswith("unknown key ")
    if nearest is not None:
        assert f"; did you mean {nearest}?" in message


def test_all_unknown_keys_are_named_at_once() -> None:
    """Seen failing with the first one raised."""
    assert len(error_of({"run": {"step": 3}, "queue": {"eta": 1}, "zzz": 1}).splitlines()) == 3


@pytest.mark.parametrize(
    ("raw", "field", "value"),
    [
        ({"run": {"steps": "many"}}, "run.steps", "'many'"),
        ({"run": 3}, "run", "3"),
        ({"run": {"stall_timeout_s": float("inf")}}, "run.stall_timeout_s", "inf"),
        ({"data": {"arith": {"max_value": 0}}}, "data.arith.max_value", "0"),
        ({"run": {"seed": 2**64}}, "run.seed", str(2**64)),
        ({"rollout": {"temperature": 0.005}}, "rollout.temperature", "0.005"),
    ],
)
def test_a_wrong_value_is_named_with_its_field(raw: dict[str, Any], field: str, value: str) -> None:
    """Seen failing: with `inf` the watchdog would never raise, torch refuses the seed, vLLM samples at 0.01."""
    message = error_of(raw)
    assert message.startswith(f"{field}: ")
    assert message.endswith(f", got {value}")


# --- impossible combinations: field, value, remedy ---

COMBINATIONS = [
    ({"queue": {"max_staleness": -1}}, ["queue.max_staleness", "got -1", "greater than or equal to 0"]),
    ({"queue": {"max_staleness": 2, "max_ahead": 3}}, ["queue.max_ahead", "3", "at most queue.max_staleness=2"]),
    (
        {"queue": {"groups_per_step": 3, "samples_per_group": 5}, "trainer": {"minibatches": 4}},
        ["queue.groups_per_step * queue.samples_per_group", "3 * 5 = 15", "set trainer.minibatches to a divisor"],
    ),
    (
        {"queue": {"groups_per_step": 2, "samples_per_group": 2}, "trainer": {"minibatches": 2, "ranks": 3}},
        ["trainer.ranks", "4 samples, 2 minibatches and 3 ranks", "raise queue.groups_per_step or lower trainer.ranks"],
    ),
    ({"queue": {"samples_per_group": 1}}, ["queue.samples_per_group", "got 1", "2 or more"]),
    (
        {"objective": {"proximal": "reuse"}, "trainer": {"minibatches": 2}},
        ["objective.proximal=reuse", "trainer.minibatches=2", "set it to 1, or objective.proximal to recompute"],
    ),
    (
        {"objective": {"proximal_kl_coef": 0.1}, "trainer": {"minibatches": 1}},
        ["objective.proximal_kl_coef=0.1 is not read with trainer.minibatches=1", "raise trainer.minibatches"],
    ),
    (
        {"rollout": {"max_new_tokens": 512}, "model": {"max_context": 512}},
        ["rollout.max_new_tokens", "512", "raise model.max_context"],
    ),
    (
        {**EVALUATED, "reward_watch": {"verifiers": {"truth": {"function": "mth"}}}},
        ["reward_watch.verifiers.truth.function: ", "did you mean math"],
    ),
    ({"reward_watch": {"stop": True}}, ["reward_watch.stop=True is not read without reward_watch.verifiers"]),
    (
        {**EVALUATED, **WATCHED, "verifier": {"eval_function": "exact"}},
        ["verifier.eval_function must be null with reward_watch", "got exact: name it in reward_watch.verifiers"],
    ),
    (WATCHED, ["run.eval_every must be above 0 with reward_watch", "got 0: set it"]),
    ({"trainer": {"ranks": 4, "mesh": {"replicate": 3}}}, ["trainer.ranks=4", "replicate=3"]),
    ({"trainer": {"ranks": 4, "mesh": {"tensor": 3}}}, ["trainer.ranks=4", "tensor=3"]),
    ({"trainer": {"ranks": 4, "mesh": {"replicate": 2, "context": 4}}}, ["trainer.mesh.context", "2 ranks", "got 4"]),
    (
        {"trainer": {"ranks": 2, "mesh": {"expert": 4}}},
        ["trainer.mesh.expert", "2 ranks", "got 4 and 1", "set it to 1"],
    ),
    ({"trainer": {"ranks": 4, "mesh": {"expert": 2, "tensor": 2}}}, ["trainer.mesh.expert", "tensor=1", "got 2 and 2"]),
    ({"trainer": {"ranks": 2, "mesh": {"context": 2}, "attention": "eager"}}, ["trainer.attention=sdpa", "eager"]),
    ({"trainer": {"ranks": 2, "mesh": {"context": 2}, "packing": True}}, ["trainer.packing", "context=2"]),
    (
        {"trainer": {"packing": True}, "objective": {"preset": "ppo"}, "critic": {"path": "another"}},
        ["trainer.packing", "critic.path"],
    ),
    ({"trainer": {"ranks": 2, "mesh": {"tensor": 2}, "lora": {}}}, ["trainer.lora", "trainer.mesh.tensor=2", "leave"]),
    ({"trainer": {"ranks": 2, "mesh": {"expert": 2}, "lora": {}}}, ["trainer.lora", "trainer.mesh.expert=2", "leave"]),
    ({"verifier": {"function": "last_numer"}}, ["verifier.function: ", "did you mean last_number"]),
    ({"verifier": {"eval_function": "last_numer"}}, ["verifier.eval_function: ", "did you mean last_number"]),
    ({"verifier": {"function": {"exact": 1, "formt": 0.2}}}, ["did you mean format"]),
    ({"verifier": {"named": {"mine": {"function": "mth"}}}}, ["verifier.named.mine.function: ", "did you mean math"]),
    ({"verifier": {"named": {"a:b": {"function": "math"}}}}, ["a name in verifier.named must match pattern", "'a:b'"]),
    ({"verifier": {"function": {"exact": 1, "math": 1}, "arguments": {"x": 1}}}, ["not read with verifier.function="]),
    ({"verifier": {"function": {}}}, ["must name a verifier"]),
    ({"verifier": {"function": ""}}, ["got ''"]),
    ({"verifier": {"function": {"math": 1, "": 1}}}, ["got ''"]),
    ({"rollout": {"workflow": ""}}, ["got ''"]),
    (
        {"verifier": {"function": "m", "arguments": {"x": 1}, "named": {"m": {"function": "math"}}}},
        ["is not read with verifier.function=m"],
    ),
    ({"rollout": {"workflow": "multi_turns"}}, ["rollout.workflow: ", "did you mean multi_turn?"]),
    ({"rollout": {"workflows": {"a:b": {"function": "single_turn"}}}}, ["a name in rollout.workflows must match"]),
    ({"rollout": {"workflow_arguments": {"a": 1}}}, ["rollout.workflow_arguments={'a': 1} is not read with"]),
    (
        {"rollout": {"workflow": "guess_number", "workflow_command": "true"}},
        ["rollout.workflow=guess_number is not read with rollout.workflow_command"],
    ),
    (
        {"rollout": {"workflow": "guess_number", "turn_timeout_s": 200.0}},
        ["rollout.turn_timeout_s must be less than run.stall_timeout_s, got 200 and 120"],
    ),
    ({"weights": {"transport": "nccl"}}, ["weights.transport=nccl", "run.device=cuda", "set weights.transport=gloo"]),
    ({"run": {"device": "cuda"}}, ["weights.transport=gloo", "run.device=cuda", "set weights.transport=nccl"]),
    ({**IPC, "rollout": {"tensor_parallel": 2}}, ["shares the one GPU of a rank, got rollout.tensor_parallel=2"]),
    ({**IPC, "rollout": {"servers": [SERVER]}}, ["weights.transport=ipc is for", "got rollout.servers: set nccl"]),
    ({"rollout": {"servers": ["10.0.0.5:8000"]}}, ["rollout.servers must be addresses", "got '10.0.0.5:8000'"]),
    ({"rollout": {"servers": [SERVER], "workers": 2}}, ["a server for each worker", "rollout.workers=2: set as many"]),
    ({"rollout": {"servers": [SERVER, SERVER], "workers": 2}}, ["a server for each worker", "each server once"]),
    (
        {**GPU, "rollout": {"servers": [SERVER], "replay_routes": True}},
        ["replay_routes=True is not read with", "false"],
    ),
    ({"rollout": {"server_key_env": "KEY"}}, ["rollout.server_key_env=KEY is not read without rollout.servers"]),
    (
        {"rollout": {"workflow_arguments": {"points": {1: 0.5}}}},
        ["rollout.workflow_arguments", "{1: 0.5}", "quote keys"],
    ),
    ({"verifier": {"arguments": {"words": {"a"}}}}, ["verifier.arguments must hold what JSON can", "{'a'}", "convert"]),
    ({**IPC, "rollout": {"workers": 2}}, ["one GPU of a rank, got", "rollout.workers=2 and trainer.ranks=1", "raise"]),
]


@pytest.mark.parametrize(("raw", "words"), COMBINATIONS, ids=lambda item: item[0] if isinstance(item, list) else None)
def test_an_impossible_combination_names_field_value_and_remedy(raw: dict[str, Any], words: list[str]) -> None:
    """Seen failing, one by one, with each check taken out of its section, with an empty name taken for none, and with
    number keys that verifiers got as texts."""
    assert_refused(raw, words)


# --- overrides ---


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("trainer: {lr: 1.0e-3}\ntrainer: {ranks: 2}", "duplicate key 'trainer'"),
        ("queue:\n  max_staleness: 1\n  max_staleness: 2", "duplicate key 'max_staleness'"),
    ],
)
def test_a_key_that_stands_twice_is_refused(tmp_path: Path, content: str, message: str) -> None:
    """Seen failing: the last one won, and what the first had set was gone."""
    (path := tmp_path / "a.yaml").write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_config(str(path))


def test_a_date_is_a_text_and_merged_keys_may_be_set_anew(tmp_path: Path) -> None:
    """Seen failing with dates, which no run folder can hold; and with a merge of what was merged: "duplicate key"."""
    (path := tmp_path / "a.yaml").write_text(
        "model:\n  chat_arguments: &a {date_string: 2024-07-26}\n"
        "verifier: {named: {m: {function: math, arguments: &b {<<: *a, date_string: x}}}}\nrun: {env: {<<: *b}}"
    )
    config = load_config(str(path), ["run.dir=2024-02-30"])
    assert config.model.chat_arguments == {"date_string": "2024-07-26"}
    assert config.run.env == {"date_string": "x"}
    assert config.run.dir == "2024-02-30"


def test_an_override_changes_what_it_names_alone(tmp_path: Path) -> None:
    """An anchor's mapping is the same object where it is an alias. Seen failing: the aliases changed with it."""
    (path := tmp_path / "a.yaml").write_text("verifier: {arguments: {a: &a {b: {c: 1}}, d: *a, e: {<<: *a}}}")
    arguments = load_config(str(path), ["verifier.arguments.a.b.c=2"]).verifier.arguments
    assert arguments == {"a": {"b": {"c": 2}}, "d": {"b": {"c": 1}}, "e": {"b": {"c": 1}}}


@pytest.mark.parametrize("text", ["1e-6", "-3E+4", "1.5e-3"])
def test_a_number_with_an_exponent_is_a_number(text: str) -> None:
    """Seen failing as a text, with which a verifier's argument was refused. 1e5 may be a name."""
    assert parse_override(f"a.b={text}")[1] == float(text)
    assert parse_override("a.b=1e5")[1] == "1e5"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("run.steps", "an override is section.field=value, got 'run.steps'"),
        ("run.steps.x=3", "'run.steps.x=3' reaches into 'steps', which is a value"),
        ("run.steps=[", "the value of run.steps must be YAML, got '[': write it as 'run.steps=\"...\"'"),
    ],
)
def test_a_wrong_override_is_named(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("arith_cpu", [word])
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["/a b/ü 'x' \"y\"", "/run #3", "/a: b", "'q'", "[x]", "007", "on", "", "*x", "{a"])
def test_any_text_can_be_an_override(text: str) -> None:
    """Seen failing, in a resume of a run folder: `/run #3` was the folder `/run`, and `####` was null."""
    assert parse_override(override("run.dir", text)) == ("run.dir", text)
    assert parse_override("run.dir=/run #3 ") == ("run.dir", "/run #3")
    assert parse_override("verifier.arguments.behind= #### ") == ("verifier.arguments.behind", "####")
    assert parse_override("run.dir=007") == ("run.dir", "007")  # seen as the folder 7
    assert parse_override('run.dir="/run" # why') == ("run.dir", "/run")


# --- the machine ---


@pytest.mark.parametrize("command", ["train", "sft"])
def test_more_trainer_ranks_than_cores_is_a_warning_on_cpu(command: str) -> None:
    """Seen failing with the warning among the errors, and with `>=`."""
    config = parse_any_config({"command": command, "trainer": {"ranks": 3}})
    assert core_warning(config, num_cores=3) == ""
    warning = core_warning(config, num_cores=2)
    assert "trainer.ranks=3 on 2 CPU cores" in warning
    assert "set 2 or fewer" in warning


# --- check-config ---


@pytest.mark.parametrize("name", ["gsm8k_first", "gsm8k_1node", "gsm8k_4node"])
def test_a_recipe_with_short_answers_turns_thoughts_off(name: str) -> None:
    """Qwen3 thinks by default. Seen failing with `{}`: most answers would be cut within a thought."""
    assert load_config(name).model.chat_arguments == {"enable_thinking": False}


@pytest.mark.parametrize("name", shipped_recipes())
def test_what_check_config_prints_is_the_recipe_again(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With the meaning of every setting. A recipe reads the same by name and by path.

    Seen failing with an unknown key in a recipe, with multi-line values written over several lines, their meaning
    behind the last one, and with sub-sections left out.
    """
    assert load_any_config(name) == load_any_config(str(recipe_folder() / f"{name}.yaml"))
    overrides = ["model.path='a: b # c'", "run.dir=null", "run.resume='0'", "run.env={}"]
    assert main(["check-config", name, *overrides]) == 1  # there is no such model
    lines = capsys.readouterr().out.splitlines()
    config = load_any_config(name, overrides)
    assert parse_section(yaml.safe_load("\n".join(lines)), type(config)) == config
    for key, description in fields_of(type(config)).items():
        assert any(line.strip().startswith(f"{key.rsplit('.')[-1]}: ") and description in line for line in lines), key
    if name == "mixed_cpu":  # its sources have lines of their own
        return
    headings = [line for line in lines if line.endswith(":")]
    assert len(lines) == len(fields_of(type(config))) + len(headings)
