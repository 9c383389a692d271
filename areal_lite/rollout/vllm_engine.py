"""The generation engine: vLLM's `AsyncLLM`, and what the weights' plane needs of it.

The only file of the rollout side that imports vLLM. Start it inside the process that owns it
(`await VllmEngine.start(...)`); the model then lives in one engine-core process below.
"""

import asyncio
import dataclasses
import gc
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Self, TypeVar

import numpy as np
from pydantic import PydanticUserError, TypeAdapter, ValidationError

from areal_lite.config.reading import explained
from areal_lite.config.recipe import Config
from areal_lite.config.sections import RolloutConfig
from areal_lite.config.suggestion import suggestion
from areal_lite.data.encode import decoder, load_tokenizer
from areal_lite.errors import ConfigError, EngineError
from areal_lite.node import out_of_memory
from areal_lite.rollout.engine import Interrupt, Sampling
from areal_lite.rollout.engine_settings import engine_arguments, engine_environment, own_arguments
from areal_lite.types import Float32, Sample, StopReason, VersionSpan

T = TypeVar("T")

_LIVENESS_SLICE_S = 0.5
"""How often a call in flight looks whether the engine died: vLLM never fails a pending `collective_rpc`."""
_RESET_TIMEOUT_S = 10.0
_RESET_POLL_S = 0.005


class VllmEngine:
    """One vLLM engine with exact version stamps, pause and resume, and weight transfer."""

    def __init__(
        self, llm: Any, tokenizer: Any, progress: Any, *, text_of: Callable[[Sequence[int]], str], ends_at_once: bool
    ) -> None:
        self._llm = llm
        self.text_of = text_of
        """Turns a completion's token ids into its text."""
        self._ends_at_once = ends_at_once
        self._tokenizer = tokenizer
        self._progress = progress
        self._request_numbers = itertools.count()
        self._tokens_before = 0
        self.context_tokens = self.cached_tokens = 0
        """Tokens that requests stood behind, and those of them whose keys and values were found in the prefix cache."""
        self._closed = False

    @classmethod
    async def start(cls, config: Config, *, model_folder: str) -> Self:
        """Load the model and start the engine-core process.

        Args:
            config: The recipe; sections `model`, `rollout`, `weights` and `run` are read.
            model_folder: A Hugging Face model folder.

        Raises:
            EngineError: vLLM could not start; its own words are in the message.
        """
        _set_environment(config)
        from vllm.envs import enable_envs_cache
        from vllm.utils.gc_utils import freeze_gc_heap
        from vllm.v1.engine.async_llm import AsyncLLM

        progress = _progress_logger_class()
        try:
            llm = AsyncLLM.from_engine_args(_engine_args(config, model_folder), stat_loggers=[progress])
            tokenizer = load_tokenizer(model_folder, config.model)
            text_of = decoder(tokenizer, model_folder, skip_special_tokens=config.verifier.skip_special_tokens)
            engine = cls(llm, tokenizer, progress, text_of=text_of, ends_at_once=config.run.device == "cpu")
            await engine.stamp(0)
            # The first request pays vLLM's warm-up; pay it before anybody measures or waits.
            await engine.generate([engine._tokenizer.eos_token_id or 0], Sampling(max_new_tokens=2, temperature=0.0))
            # As vLLM does in its own processes: what is there now stays, so the collector need not look at it again.
            freeze_gc_heap()
            enable_envs_cache()
        except Exception as error:
            raise EngineError(
                f"vLLM should have started on {model_folder}, got {type(error).__name__}: {error}{out_of_memory()}"
            ) from error
        return engine

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def tokens_generated(self) -> int:
        """Output tokens since the start or the last `reset`, running samples included."""
        return int(self._progress.tokens) - self._tokens_before

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Sample:
        """Complete one prompt; cancelling its task ends the request.

        Raises:
            EngineError: The engine died, or returned something other than a finished completion.
        """
        output = await self._final(prompt_ids, sampling_params(sampling))
        self.context_tokens += len(prompt_ids)
        self.cached_tokens += output.num_cached_tokens or 0
        completion = output.outputs[0]
        if completion.finish_reason not in ("stop", "length") or not completion.token_ids:
            raise EngineError(f"a completion must end with stop or length, got {completion.finish_reason!r}")
        token_ids, routes = np.asarray(completion.token_ids, dtype=np.int32), completion.routed_experts
        # Of tokens that were drawn before an interrupt it has those of then, not of the prefill behind it.
        if routes is not None and len(routes) != len(prompt_ids) + len(token_ids) - 1:
            raise EngineError(
                f"vLLM must return the experts of all {len(prompt_ids)} + {len(token_ids)} tokens but the last, got "
                f"{len(routes)}: set rollout.replay_routes=false"
            )
        return Sample(
            token_ids=token_ids,
            logprobs=_sampled_logprobs(completion),
            spans=tuple(
                VersionSpan(version=int(span.version), start=span.start, end=span.end)
                for span in completion.weight_versions
            ),
            stop_reason=StopReason.STRING
            if isinstance(completion.stop_reason, str)
            else StopReason(completion.finish_reason),
            text=self.text_of(completion.token_ids),
            routes=routes,
        )

    async def score(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Float32:
        """Return [T] log-probabilities of given output tokens, at temperature 1, by a fresh prefill."""
        logprobs_T, _ = await self.score_with_routes(prompt_ids, output_ids)
        return logprobs_T

    async def score_with_routes(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> tuple[Float32, Any]:
        """Return what `score` does, and the experts chosen, as `Sample.routes`; None where vLLM returns none."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False
        )
        tokens = [*map(int, prompt_ids), *map(int, output_ids)]
        output = await self._final(tokens, params)
        start = len(prompt_ids)
        values = [output.prompt_logprobs[start + i][int(token)].logprob for i, token in enumerate(output_ids)]
        routes = output.outputs[0].routed_experts
        return np.array(values, dtype=np.float32), None if routes is None else routes[: len(tokens) - 1]

    async def pause(self, interrupt: Interrupt) -> None:
        """Stop generating, in the manner of `rollout.interrupt`: `drain` lets running samples finish first.

        `recompute` and `drain` also drop the caches; `keep_kv` leaves them (prefix caching is off then, so
        that no new request can start from a cache of older weights).
        """
        mode = "wait" if interrupt == "drain" else "keep"
        # Not `llm.pause_generation`: it adds a fixed sleep of 20 ms that vLLM itself calls unnecessary.
        await self._guarded(self._llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=interrupt != "keep_kv"))

    async def resume(self) -> None:
        """Go on generating."""
        await self._guarded(self._llm.resume_generation())

    async def reset(self) -> None:
        """End every request, drop every cache, and count tokens from 0, paused; weights and version stay as they are.

        Raises:
            EngineError: A request does not end.
        """
        await self._guarded(self._until_empty())
        self._tokens_before = int(self._progress.tokens)

    async def _until_empty(self) -> None:
        deadline = time.monotonic() + _RESET_TIMEOUT_S
        while True:
            # Again and again: a request may be on its way to the engine core while the ones before it are ended.
            await self._llm.engine_core.pause_scheduler_async(mode="abort", clear_cache=True)
            count = self._llm.output_processor.get_num_unfinished_requests()
            if count == 0:
                return
            if time.monotonic() > deadline:
                raise EngineError(f"an engine must be empty {_RESET_TIMEOUT_S:g} s after a reset, got {count} requests")
            await asyncio.sleep(_RESET_POLL_S)

    async def stamp(self, version: int) -> None:
        """Have the engine itself label every token from now on with this version (invariant I3)."""
        await self._guarded(self._llm.update_weight_version(str(version)))

    async def weights_call(self, method: str, argument: dict[str, Any] | None = None) -> None:
        """Pass one call of vLLM's weight-transfer protocol on to the engine-core process."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

        match method:
            case "init_weight_transfer_engine":
                call = self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=argument or {}))
            case "update_weights":
                call = self._llm.update_weights(WeightTransferUpdateRequest(update_info=argument or {}))
            case "start_weight_update" | "finish_weight_update":
                call = getattr(self._llm, method)()
            case _:
                raise ValueError(f"not a weight-transfer call: {method!r}")
        await self._guarded(call)

    async def parameter_squares(self) -> Any:
        """Return what each process of the engine has, for `weights/families.py`."""
        return await self._guarded(self._llm.collective_rpc("parameter_squares"))

    def raise_if_dead(self) -> None:
        """Raise if the engine-core process has died.

        Raises:
            EngineError: It has.
        """
        if self._llm.errored:
            raise _died()

    async def close(self) -> None:
        """Stop the engine-core process; idempotent.

        It takes seconds to tidy up, and vLLM waits for it, 5 s at most. On a CPU it is killed: there is nothing to
        tidy up but memory.
        """
        from vllm.envs import disable_envs_cache

        if not self._closed:
            self._closed = True
            gc.unfreeze()
            disable_envs_cache()
            self._llm.shutdown(timeout=0.0 if self._ends_at_once else None)
            # Its `__del__` calls this once more, maybe at the end of the interpreter, when its module is no more.
            self._llm.shutdown = lambda: None

    async def _final(self, prompt_ids: Sequence[int], params: Any) -> Any:
        from vllm.v1.engine.exceptions import EngineDeadError

        request_id = str(next(self._request_numbers))
        final = None
        try:
            prompt = {"prompt_token_ids": list(prompt_ids)}
            async for output in self._llm.generate(prompt, params, request_id):
                final = output
        except EngineDeadError as error:
            raise _died() from error
        return final

    async def _guarded(self, call: Awaitable[T]) -> T:
        """Await a call of the engine, or raise once the engine is dead."""
        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=_LIVENESS_SLICE_S)
                if not task.done():
                    self.raise_if_dead()
        finally:
            task.cancel()
        if task.exception() is not None and self._llm.errored:
            raise _died() from task.exception()  # of many kinds
        return task.result()


def _died() -> EngineError:
    return EngineError(f"the engine-core process died{out_of_memory()}; see the worker's log")


def check_engine_arguments(config: Config) -> None:
    """Compare what `rollout` says in vLLM's words with what vLLM takes, which is imported only where there is any.

    Raises:
        ConfigError: Names that vLLM does not know or areal-lite sets, or values of another type; a line per mistake.
    """
    if mistakes := [*_argument_mistakes(config), *_parser_mistakes(config), *_route_mistakes(config)]:
        raise ConfigError("\n".join(mistakes))


def _route_mistakes(config: Config) -> Iterable[str]:
    if config.rollout.replay_routes and config.run.device == "cpu":
        yield (
            "rollout.replay_routes needs engines on GPUs, got run.device=cpu: vLLM's CPU build cannot say which "
            "experts it chose (that takes its model runner V2, which takes Triton); set it to false"
        )


def _parser_mistakes(config: Config) -> Iterable[str]:
    for kind in ("tool", "reasoning"):
        name = getattr(config.rollout, f"{kind}_parser")
        if name is None or (":" in name and kind == "tool"):  # a function, which is imported with the recipe's others
            continue
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager

        known = (ToolParserManager if kind == "tool" else ReasoningParserManager).list_registered()
        if name not in known:
            names = ", ".join(known)
            yield f"rollout.{kind}_parser must be one of vLLM's, {names}; got {name!r}{suggestion(name, known)}"


def _argument_mistakes(config: Config) -> Iterable[str]:
    if not config.rollout.engine_arguments:
        return
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm.engine.arg_utils import AsyncEngineArgs

    known: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(AsyncEngineArgs)}
    own = {"weight_transfer_config": "", **own_arguments(config)}
    for name, value in config.rollout.engine_arguments.items():
        place = f"rollout.engine_arguments.{name}"
        if name in own:
            yield f"{place} must not be set, areal-lite does (from rollout, model, weights, run.device): leave it out"
        elif name not in known:
            yield f"{place} is none of vLLM's AsyncEngineArgs{suggestion(name, known.keys() - own)}"
        else:
            try:
                TypeAdapter(known[name]).validate_python(value)
            except ValidationError as error:
                yield from explained(error, RolloutConfig, prefix=f"{place}.")
            except (PydanticUserError, NameError):
                continue  # vLLM's own annotation means nothing here: it looks at the value as it starts


def sampling_params(sampling: Sampling) -> Any:
    """Return the parameters of a request as vLLM takes them."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=sampling.max_new_tokens,
        # Not `min_tokens`, which forbids the end token: the log-probabilities would be those of another policy.
        ignore_eos=sampling.ignore_end,
        temperature=sampling.temperature,
        seed=sampling.seed,
        logprobs=0,
        output_kind=RequestOutputKind.FINAL_ONLY,
        stop=list(sampling.stop),
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        skip_clone=True,  # made for this one request
    )


def _sampled_logprobs(completion: Any) -> Float32:
    """Log-probability of each sampled token, [T]."""
    pairs = zip(completion.logprobs, completion.token_ids, strict=True)
    return np.array([position[token].logprob for position, token in pairs], dtype=np.float32)


def _set_environment(config: Config) -> None:
    """Settings that vLLM reads from the environment, before it is imported."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.update(engine_environment(config))


def _engine_args(config: Config, model_folder: str) -> Any:
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    arguments = engine_arguments(config, model_folder=model_folder)
    transfer = WeightTransferConfig(backend=config.weights.transport)
    return AsyncEngineArgs(weight_transfer_config=transfer, **arguments)


def _progress_logger_class() -> Any:
    """A vLLM stat logger that only counts generated tokens, on the class so that it can be read.

    As a Prometheus logger it takes the place of vLLM's own, whose figures nobody would read.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class Progress(PrometheusStatLogger):  # type: ignore[misc]
        tokens = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
            if iteration_stats is not None:
                Progress.tokens += iteration_stats.num_generation_tokens

        def log_engine_initialized(self) -> None:
            pass

    return Progress
