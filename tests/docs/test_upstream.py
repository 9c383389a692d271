"""What the package subclasses or calls inside vLLM, Ray and transformers, by its upstream name.

    python tests/docs/test_upstream.py FOLDER     the same for packages in another folder, such as an unzipped wheel

Sources are read, not imported, so that a build for GPUs can be checked anywhere. An upgrade that renames or moves
something fails here first, with one line for each name.
"""

import ast
import importlib.util
import itertools
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path

from test_imports import imports, modules

UPSTREAM = """
vllm: SamplingParams
vllm.config: WeightTransferConfig
vllm.distributed.device_communicators.pynccl: PyNcclCommunicator(available disabled device nccl comm group broadcast)
vllm.distributed.device_communicators.pynccl_wrapper: NCCLLibrary(ncclCommAbort)
vllm.distributed.weight_transfer: nccl_common
vllm.distributed.weight_transfer.base: ParamMeta(name dtype shape) TrainerWeightTransferEngine(client is_sender)
    VLLMWeightSyncClient(init_weight_transfer_engine start_weight_update update_weights finish_weight_update)
    WeightSource(metadata __iter__) WeightTransferInitInfo WeightTransferUpdateInfo
    WeightTransferInitRequest(init_info) WeightTransferUpdateRequest(update_info)
    WeightTransferEngine(init_info_cls update_info_cls model model_config parallel_config parse_update_info
    init_transfer_engine start_weight_update update_weights receive_weights finish_weight_update shutdown)
vllm.distributed.weight_transfer.factory: WeightTransferEngineFactory(_registry register_engine)
vllm.distributed.weight_transfer.ipc_engine: IPCTrainerInitInfo IPCTrainerWeightTransferEngine(trainer_init
    send_weights)
vllm.distributed.weight_transfer.nccl_common: trainer_init
vllm.distributed.weight_transfer.nccl_engine:
    NCCLTrainerWeightTransferEngine(send_weights shutdown _broadcast _checked_iter model_update_group
    packed_buffer_size_bytes)
    NCCLWeightTransferEngine(init_transfer_engine start_weight_update receive_weights finish_weight_update shutdown
    model_update_group) NCCLWeightTransferInitInfo NCCLWeightTransferUpdateInfo
vllm.engine.arg_utils: AsyncEngineArgs EngineArgs(weight_transfer_config worker_extension_cls)
vllm.entrypoints.anthropic.protocol: AnthropicMessagesRequest
vllm.entrypoints.anthropic.serving: AnthropicServingMessages(to_chat_completion_request messages_full_converter
    message_stream_converter)
vllm.entrypoints.generate.base.protocol: DeltaMessage
vllm.entrypoints.openai.chat_completion.protocol: ChatCompletionRequest ChatCompletionResponse
vllm.entrypoints.openai.completion.protocol: CompletionRequest
vllm.entrypoints.openai.responses.protocol: ResponsesRequest
vllm.entrypoints.openai.responses.streaming_events: SimpleStreamingEventProcessor(close_current open
    resolve_target_state emit_delta) split_delta
vllm.entrypoints.openai.responses.utils: construct_input_messages construct_tool_dicts
vllm.envs: disable_envs_cache enable_envs_cache
vllm.model_executor.layers.attention: Attention is_deferred_attention_layer
vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:
    UnquantizedFusedMoEMethod(process_weights_after_loading)
vllm.model_executor.layers.linear: LinearBase QKVParallelLinear(num_kv_head_replicas)
    UnquantizedLinearMethod(process_weights_after_loading)
vllm.model_executor.layers.vocab_parallel_embedding: ParallelLMHead
    UnquantizedEmbeddingMethod(process_weights_after_loading)
vllm.model_executor.model_loader: reload
vllm.model_executor.model_loader.reload: initialize_layerwise_reload finalize_layerwise_reload
vllm.model_executor.model_loader.reload.layerwise: _get_original_loader get_layerwise_info
vllm.model_executor.model_loader.reload.meta: materialize_meta_tensor to_meta_tensor
vllm.model_executor.model_loader.reload.sanitize: restore_layer_refs
vllm.model_executor.model_loader.reload.types: LayerReloadingInfo(restore_metadata)
vllm.outputs: WeightVersionSpan(version start end) RequestOutput(prompt_logprobs num_cached_tokens outputs)
    CompletionOutput(token_ids logprobs finish_reason stop_reason routed_experts weight_versions)
vllm.parser.parser_manager: ParserManager(get_parser)
vllm.reasoning: ReasoningParserManager
vllm.sampling_params: RequestOutputKind(FINAL_ONLY) SamplingParams(max_tokens ignore_eos temperature seed logprobs
    prompt_logprobs output_kind stop detokenize skip_special_tokens skip_clone)
vllm.tool_parsers: ToolParserManager
vllm.utils.gc_utils: freeze_gc_heap
vllm.v1.engine.async_llm: AsyncLLM(from_engine_args generate engine_core output_processor resume_generation
    update_weight_version collective_rpc errored shutdown init_weight_transfer_engine start_weight_update update_weights
    finish_weight_update)
vllm.v1.engine.core_client: AsyncMPClient(pause_scheduler_async)
vllm.v1.engine.exceptions: EngineDeadError
vllm.v1.engine.output_processor: OutputProcessor(get_num_unfinished_requests)
vllm.v1.metrics.loggers: PrometheusStatLogger(record log_engine_initialized)
vllm.v1.metrics.stats: IterationStats(num_generation_tokens)
ray._private.authentication.authentication_token_setup: maybe_enable_token_auth_if_token_available
ray._private.node: Node(all_processes)
ray._private.runtime_env.constants: RAY_JOB_CONFIG_JSON_ENV_VAR
ray._private.state: available_resources_per_node
ray._private.worker: global_worker _global_node gcs_error_subscriber Worker(threads_stopped)
ray.job_submission: JobSubmissionClient
ray.scripts.scripts: main
ray.util.placement_group: PlacementGroup placement_group remove_placement_group
ray.util.scheduling_strategies: NodeAffinitySchedulingStrategy PlacementGroupSchedulingStrategy
transformers.conversion_mapping: get_model_conversion_mapping
transformers.core_model_loading: Concatenate(dim) MergeModulelist WeightConverter(operations)
transformers.distributed: DistributedConfig
transformers.distributed.tensor_parallel: _AllReduceBackward apply_expert_parallelism apply_tensor_parallelism
    replace_layer_number_by_wildcard
transformers.integrations.sdpa_attention: sdpa_attention_forward
transformers.modeling_layers: GradientCheckpointingLayer
transformers.distributed.mixin: DistributedMixin(maybe_distribute_model)
transformers.modeling_utils: PreTrainedModel(tp_plan _can_record_outputs)
transformers.pytorch_utils: Conv1D
transformers.utils: get_json_schema
transformers.utils.output_capturing: OutputRecorder(target_class)
"""
"""Module: names, with the members of classes in brackets."""
PACKAGES = ("vllm", "ray", "transformers")
INTERNAL = re.compile(r"vllm\.|ray\.\w+\.|ray\._|transformers\.\w+\.")
SHARED = {
    "vllm.distributed.weight_transfer.base.WeightSource",
    "vllm.entrypoints.openai.chat_completion.protocol.ChatCompletionRequest",
}
"""Data that one of our files makes and another reads; all else has one file that knows it."""


def table() -> list[tuple[str, str, list[str]]]:
    """Return module, name and members of every entry."""
    lines = UPSTREAM.replace("\n    ", " ").strip().splitlines()
    found = [(module, names) for module, _, names in (line.partition(":") for line in lines)]
    return [
        (module, name, members.split())
        for module, names in found
        for name, members in re.findall(r"(\w+)(?:\(([^)]*)\))?", names)
    ]


@cache
def names(module: str, kind: str, site: Path) -> set[str]:
    """Return what a module, or a class in it, defines, imports or assigns, in branches and on `self` too."""
    path = site.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree: ast.AST = ast.parse(path.read_text()) if path.is_file() else ast.Module()
    nodes = [node for node in ast.walk(tree) if not kind or (isinstance(node, ast.ClassDef) and node.name == kind)]
    found = {file.stem for file in path.parent.iterdir()} if path.stem == "__init__" else set[str]()
    for node in nodes if not kind else itertools.chain(*map(ast.walk, nodes)):
        if not isinstance(getattr(node, "ctx", None), ast.Load):
            found |= {getattr(node, field, None) or "" for field in ("name", "attr", "id", "asname")}
        if isinstance(node, ast.Constant):  # of lazy imports
            found.add(str(node.value))
    return found


def missing(sites: dict[str, Path]) -> list[str]:
    """Return the entries of the table that are not in these folders of packages."""
    found = []
    for module, name, members in table():
        site = sites.get(module.partition(".")[0])
        if site is None:
            continue
        if name not in names(module, "", site):
            found.append(f"{module}: {name}")
        else:
            found += [f"{module}: {name}.{one}" for one in members if one not in names(module, name, site)]
    return found


def test_what_we_use_of_others_is_where_we_expect_it() -> None:
    """Seen failing with the sources of vLLM 0.31 (`WeightVersionSpan`) and 0.33 (`WeightSource.__iter__`)."""
    specs = {name: importlib.util.find_spec(name) for name in PACKAGES}
    assert missing({name: Path(str(spec.origin)).parents[1] for name, spec in specs.items() if spec}) == []


def test_the_table_names_all_that_we_import() -> None:
    """Public names at the top of Ray and transformers aside. Seen failing with a line left out."""
    known = {f"{module}.{name}" for module, name, _ in table()}
    used = {name for path in modules().values() for name in imports(path) if INTERNAL.match(name)}
    private = {
        ast.unparse(node)
        for path in modules().values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and re.fullmatch(r"ray\._private\.\w+\.\w+", ast.unparse(node))
    }
    assert sorted((used | private) - known) == []


def test_one_file_knows_an_internal() -> None:
    """Seen failing with the name of a layer in a plan read in both files of `train/` that split layers."""
    files = Counter(name for path in modules().values() for name in imports(path) if INTERNAL.match(name))
    assert {name for name, number in files.items() if number > 1} == SHARED


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    sites = {name: folder for name in PACKAGES if (folder / name).is_dir()}
    if not sites:
        sys.exit(f"expected a folder with one of {', '.join(PACKAGES)}, got {folder}. Fix: unzip the wheel into it")
    print("\n".join(missing(sites)) or f"nothing is missing in {', '.join(sites)}")
