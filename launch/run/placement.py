"""Where actors go: what each kind asks of Ray. Pure functions of the recipe."""

from typing import Any

from areal_lite.config.offline import OfflineConfig
from areal_lite.config.recipe import Config

__all__ = ["actor_options"]


def actor_options(config: Config | OfflineConfig, kind: str) -> dict[str, Any]:
    """Return the `ray.remote(...).options` of one actor.

    GPUs are reserved, so that Ray spreads engines and ranks over the nodes of a cluster. CPU cores are not: the
    recipe's thread counts share them out, and a laptop has fewer cores than the run has processes.

    Args:
        config: The recipe.
        kind: `queue`, `rollout`, `verifier` or `trainer`.
    """
    environment = {"TOKENIZERS_PARALLELISM": "false", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0}
    shared_gpu = isinstance(config, Config) and config.weights.transport == "ipc"
    on_gpu = config.run.device == "cuda"
    match kind:
        case "rollout":
            assert isinstance(config, Config), "an offline run has no engines"
            environment["OMP_NUM_THREADS"] = str(config.rollout.threads)
            options["num_gpus"] = config.rollout.tensor_parallel * (0.5 if shared_gpu else 1) if on_gpu else 0
            options["max_concurrency"] = 1000
        case "trainer":
            environment["OMP_NUM_THREADS"] = str(config.trainer.threads)
            options["num_gpus"] = (0.5 if shared_gpu else 1) if on_gpu else 0
            # One thread works, the other answers `progress`.
            options["max_concurrency"] = 2
        case "verifier":
            environment["OMP_NUM_THREADS"] = "1"
            options["max_concurrency"] = 1000
        case _:
            environment["OMP_NUM_THREADS"] = "1"
    return {**options, "runtime_env": {"env_vars": environment}}
