"""What each kind of actor asks of Ray."""

from typing import Any

import pytest
from warm_workers import OF_ACTORS, seen

from areal_lite.config.recipe import Config, load_config, parse_config
from areal_lite.events import clock_variables
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


@pytest.mark.parametrize(
    ("sections", "gpus"),
    [({"rollout": {"tensor_parallel": 2}}, [0, 2, 0, 1]), ({"weights": {"transport": "ipc"}}, [0, 0.5, 0, 0.5])],
)
def test_engines_and_ranks_reserve_gpus_and_the_others_none(sections: dict[str, Any], gpus: list[float]) -> None:
    """Over ipc they share each. Seen failing with whole GPUs there: a rank would wait for a second GPU forever."""
    config = gpu_config(**sections)
    assert [actor_options(config, kind).get("num_gpus", 0) for kind in KINDS] == gpus


@pytest.mark.parametrize("kind", KINDS)
def test_the_recipes_environment_reaches_every_actor_and_comes_first(kind: str) -> None:
    """Seen failing without it: a raylet's environment is that of whoever started it."""
    config = parse_config({"run": {"env": {"HF_HOME": "/data", "TOKENIZERS_PARALLELISM": "true"}}})
    environment = actor_options(config, kind)["runtime_env"]["env_vars"]
    assert {key: environment[key] for key in config.run.env} == config.run.env
    assert clock_variables().items() <= environment.items()


@pytest.mark.parametrize("kind", KINDS)
def test_the_tests_own_ray_can_copy_every_actor(kind: str) -> None:
    """Otherwise each imports vLLM for itself: runs pass, twice as slow. Seen failing with `MALLOC_ARENA_MAX`."""
    assert seen(actor_options(load_config("arith_cpu"), kind)["runtime_env"]["env_vars"]) == OF_ACTORS


def test_an_engine_of_several_gpus_starts_its_processes_itself() -> None:
    """In a placement group vLLM would ask Ray for actors. Seen failing with vLLM's own choice."""
    arguments = {n: engine_arguments(gpu_config(rollout={"tensor_parallel": n}), model_folder="m") for n in (1, 2)}
    assert {n: found["distributed_executor_backend"] for n, found in arguments.items()} == {1: "uni", 2: "mp"}


def test_thread_counts_are_the_recipes() -> None:
    """Seen failing with the trainer's threads for all."""
    config = parse_config({"rollout": {"threads": 3}, "trainer": {"threads": 5}})
    threads = {kind: actor_options(config, kind)["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] for kind in KINDS}
    assert threads == {"queue": "1", "rollout": "3", "verifier": "1", "trainer": "5"}
    owners = {
        "MALLOC_ARENA_MAX": "trainer",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "rollout",
        "MALLOC_MMAP_THRESHOLD_": "rollout",
    }
    for name, owner in owners.items():
        assert [kind for kind in KINDS if name in actor_options(config, kind)["runtime_env"]["env_vars"]] == [owner]


def test_a_rank_can_tell_its_progress_while_it_works() -> None:
    """I6: the watchdog asks beside a running step. Seen failing with a concurrency of 1."""
    config = load_config("arith_cpu")
    assert actor_options(config, "trainer")["max_concurrency"] == 3
    assert all(actor_options(config, kind)["max_concurrency"] >= 100 for kind in ("rollout", "verifier"))
