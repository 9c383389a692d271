"""A recipe's engine settings in vLLM's terms; vLLM is not imported here."""

import json
import shlex
from typing import Any
from urllib.parse import urlsplit

from areal_lite.config.recipe import Config


def engine_environment(config: Config) -> dict[str, str]:
    """Return the environment variables that vLLM reads when it is imported."""
    environment = {}
    if config.weights.transport == "ipc":
        # CUDA IPC handles hold classes, which vLLM passes to the engine-core process only by pickle.
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if config.run.device == "cpu":
        # Otherwise vLLM 0.32 replaces "uni" by a further process, which spins on a core.
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return environment | _of_cpu(config) | config.run.given_env


def _of_cpu(config: Config) -> dict[str, str]:
    if config.run.device != "cpu":
        return {}
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(config.rollout.threads),
        # Log-probabilities would be compiled, which takes seconds and needs a C++ compiler.
        "TORCH_COMPILE_DISABLE": "1",
    }


def engine_arguments(config: Config, *, model_folder: str) -> dict[str, Any]:
    """Return the arguments for vLLM's `AsyncEngineArgs`, except the transport: the recipe's, then our own."""
    return {"enable_prefix_caching": True, **config.rollout.engine_arguments, **own_arguments(config, model_folder)}


def own_arguments(config: Config, model_folder: str = "") -> dict[str, Any]:
    """Return the arguments that follow from other settings, or that a weight sync depends on."""
    where: dict[str, Any] = (
        {
            "enforce_eager": True,
            "kv_cache_memory_bytes": config.rollout.kv_cache_mb * 2**20,
            # After each part of a chunked prefill vLLM rewinds a seeded request's generator, which kills the engine on
            # a CPU. After an interrupt every running sample is such a prefill.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(8192, config.model.max_context),
        }
        if config.run.device == "cpu"
        else {"gpu_memory_utilization": config.rollout.gpu_memory_fraction}
    )
    return {
        "model": model_folder,
        "dtype": config.compute_dtype,
        "max_model_len": config.model.max_context,
        "max_num_seqs": config.rollout.slots,
        "tensor_parallel_size": config.rollout.tensor_parallel,
        # Otherwise vLLM would ask Ray for more actors; here all of an engine's processes belong to one actor.
        "distributed_executor_backend": "mp" if config.rollout.tensor_parallel > 1 else "uni",
        # The behaviour policy is the temperature-scaled distribution, not the raw one.
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": False,
        # No transport counts the processes of data parallelism; `rollout.workers` sets the number of engines.
        "data_parallel_size": 1,
        "worker_extension_cls": "areal_lite.weights.families.ParameterSquares",
        "pipeline_parallel_size": 1,
        "enable_return_routed_experts": config.rollout.replay_routes,
        # With keep_kv a new request could start from a prefix cached under older weights.
        **({"enable_prefix_caching": False} if config.rollout.interrupt == "keep_kv" else {}),
        **where,
    }


def server_arguments(config: Config, model_folder: str) -> dict[str, Any]:
    """Return the options of a vLLM server that can take the place of the recipe's own engine."""
    of_actors = ("distributed_executor_backend", "disable_log_stats", "enable_return_routed_experts")
    own = engine_arguments(config, model_folder=model_folder)
    return {
        **{name: value for name, value in own.items() if name not in of_actors},
        "weight_transfer_config": {"backend": config.weights.transport},
        "enable_scale_out": True,
    }


def server_command(config: Config, model_folder: str, address: str) -> str:
    """Return the line that starts such a server at an address such as `http://10.0.0.5:8000`."""
    options = [option(name, value) for name, value in server_arguments(config, model_folder).items()]
    place = urlsplit(address)
    options += [f"--host {place.hostname} --port {place.port or (443 if place.scheme == 'https' else 80)}"]
    options += [f'--api-key "${config.rollout.server_key_env}"'] if config.rollout.server_key_env else []
    variables = [f"{name}={value}" for name, value in ({"VLLM_SERVER_DEV_MODE": "1"} | _of_cpu(config)).items()]
    return " ".join([*variables, "python -m vllm.entrypoints.openai.api_server", *options])


def option(name: str, value: Any) -> str:
    """Return an argument of vLLM as an option of its server.

    >>> option("enforce_eager", True), option("enable_chunked_prefill", False), option("dtype", "float32")
    ('--enforce-eager', '--no-enable-chunked-prefill', '--dtype float32')
    """
    words = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{words}" if value else f"--no-{words}"
    return f"--{words} {shlex.quote(value if isinstance(value, str) else json.dumps(value))}"
