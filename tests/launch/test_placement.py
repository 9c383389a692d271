"""What each kind of actor asks of Ray."""

from typing import Any

import pytest

from areal_lite.config.recipe import Config, load_config, parse_config
from areal_lite.errors import ConfigError
from areal_lite.launch.run.places import actor_options
from areal_lite.rollout.engine_settings import engine_arguments

KINDS = ["queue", "rollout", "verifier", "trainer"]


def gpu_config(**sections: dict[str, Any]) -> Config:
    return parse_config({"run": {"device": "cuda"}, "weights": {"transport": "nccl"}} | sections)


@pytest.mark.parametrize("kind", KINDS)
def test_a_laptop_reserves_nothing(kind: str) -> None:
    """A run has more processes than a laptop has cores. Seen failing with one CPU reserved per actor."""
    options = actor_options(load_config("arith_cpu"), kind)
    assert options["num_cpus"] == 0
    assert options.get("num_gpus", 0) == 0
    assert options["max_restarts"] == 0, "a restarted engine would hold the initial weights"


def test_engines_and_ranks_reserve_gpus_and_the_others_none() -> None:
    """Together as many as `check_resources` counts."""
    config = gpu_config(rollout={"tensor_parallel": 2})
    assert [actor_options(config, kind).get("num_gpus", 0) for kind in KINDS] == [0, 2, 0, 1]


def test_over_ipc_an_engine_and_a_rank_share_each_gpu() -> None:
    """Seen failing with whole GPUs: a rank would wait for a second GPU forever."""
    config = gpu_config(weights={"transport": "ipc"})
    assert actor_options(config, "rollout")["num_gpus"] + actor_options(config, "trainer")["num_gpus"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_recipes_environment_reaches_every_actor_and_comes_first(kind: str) -> None:
    """Seen failing without it: a raylet's environment is that of whoever started it."""
    config = parse_config({"run": {"env": {"HF_HOME": "/data", "TOKENIZERS_PARALLELISM": "true"}}})
    environment = actor_options(config, kind)["runtime_env"]["env_vars"]
    assert {key: environment[key] for key in config.run.env} == config.run.env


def test_an_engine_of_several_gpus_starts_its_processes_itself() -> None:
    """In a placement group vLLM would ask Ray for actors. Seen failing with vLLM's own choice."""
    arguments = {n: engine_arguments(gpu_config(rollout={"tensor_parallel": n}), model_folder="m") for n in (1, 2)}
    assert {n: found["distributed_executor_backend"] for n, found in arguments.items()} == {1: "uni", 2: "mp"}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rollout": {"tensor_parallel": 2}}, r"shares the one GPU of a rank, got rollout\.tensor_parallel=2, .*=nccl"),
        ({"rollout": {"workers": 2}}, r"one GPU of a rank, got .*rollout\.workers=2 and trainer\.ranks=1: .*raise"),
    ],
)
def test_ipc_is_refused_in_shapes_that_do_not_work(sections: dict[str, Any], message: str) -> None:
    """Seen failing without the checks: Ray gives two halves as one GPU; an engine without a rank finds no weights."""
    with pytest.raises(ConfigError, match=message):
        gpu_config(weights={"transport": "ipc"}, **sections)


def test_thread_counts_are_the_recipes() -> None:
    """Seen failing with the trainer's threads for all."""
    config = parse_config({"rollout": {"threads": 3}, "trainer": {"threads": 5}})
    threads = {kind: actor_options(config, kind)["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] for kind in KINDS}
    assert threads == {"queue": "1", "rollout": "3", "verifier": "1", "trainer": "5"}


def test_a_rank_can_tell_its_progress_while_it_works() -> None:
    """I6: the watchdog asks beside a running step. Seen failing with a concurrency of 1."""
    config = load_config("arith_cpu")
    assert actor_options(config, "trainer")["max_concurrency"] == 3
    assert all(actor_options(config, kind)["max_concurrency"] >= 100 for kind in ("rollout", "verifier"))


@pytest.mark.parametrize("kind", KINDS)
def test_environment_values_are_text(kind: str) -> None:
    """Ray refuses others."""
    environment = actor_options(gpu_config(), kind)["runtime_env"]["env_vars"]
    assert all(isinstance(value, str) for value in environment.values())
