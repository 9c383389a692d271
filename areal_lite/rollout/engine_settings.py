"""A recipe's engine settings in vLLM's terms; vLLM is not imported here."""

from typing import Any

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
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        environment["OMP_NUM_THREADS"] = str(config.rollout.threads)
        # Log-probabilities would be compiled, which takes seconds and needs a C++ compiler.
        environment["TORCH_COMPILE_DISABLE"] = "1"
    return environment | config.run.given_env


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
