"""What a recipe asks of its engines, as vLLM has it. vLLM is not imported here. Seeds come with every sample."""

from typing import Any

from areal_lite.config.recipe import Config


def engine_environment(config: Config) -> dict[str, str]:
    """Return what vLLM reads from the environment, before it is imported."""
    environment = {}
    if config.weights.transport == "ipc":
        # CUDA IPC handles hold classes, which vLLM hands on to the engine-core process only by pickle.
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if config.run.device == "cpu":
        # With "uni" but multiprocessing left on, vLLM 0.32 goes back to a worker process that spins on a core.
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        environment["OMP_NUM_THREADS"] = str(config.rollout.threads)
        # Computing log-probabilities would call the inductor, which needs a C++ compiler and takes seconds.
        environment["TORCH_COMPILE_DISABLE"] = "1"
    return environment | config.run.env


def engine_arguments(config: Config, *, model_folder: str) -> dict[str, Any]:
    """Return those of vLLM's `AsyncEngineArgs`, but for the transport: the recipe's, and over them our own."""
    return {"enable_prefix_caching": True, **config.rollout.engine_arguments, **own_arguments(config, model_folder)}


def own_arguments(config: Config, model_folder: str = "") -> dict[str, Any]:
    """Return those that follow from other settings, or that a hand-over needs as they are."""
    where: dict[str, Any] = (
        {
            "enforce_eager": True,
            "kv_cache_memory_bytes": config.rollout.kv_cache_mb * 2**20,
            # vLLM rewinds a seeded request's generator after each part of a chunked prefill, which a CPU generator
            # cannot do: the engine dies. After an interrupt every running sample is such a prefill.
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
        # Beside Ray vLLM would ask it for further actors; an engine's parts are all of one actor, on one node.
        "distributed_executor_backend": "mp" if config.rollout.tensor_parallel > 1 else "uni",
        # The behaviour policy is the temperature-scaled distribution; raw log-probabilities are another one.
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": False,
        # Processes that no transport counts; more engines are `rollout.workers`.
        "data_parallel_size": 1,
        "worker_extension_cls": "areal_lite.weights.families.ParameterSquares",
        "pipeline_parallel_size": 1,
        "enable_return_routed_experts": config.rollout.replay_routes,
        # With keep_kv a new request could start from a prefix cached under older weights.
        **({"enable_prefix_caching": False} if config.rollout.interrupt == "keep_kv" else {}),
        **where,
    }
