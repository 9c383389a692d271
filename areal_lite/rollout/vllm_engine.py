"""The generation engine: vLLM's `AsyncLLM`, and what weight sync needs of it.

Only this file of the rollout side holds an engine. Start it in the process that owns it
(`await VllmEngine.start(...)`); the model is then in a child process, vLLM's engine core.
"""

import asyncio
import dataclasses
import gc
import itertools
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Self, TypeVar

import numpy as np
from pydantic import PydanticUserError, TypeAdapter, ValidationError

from areal_lite.config.plugins import is_own_code
from areal_lite.config.reading import explained
from areal_lite.config.recipe import Config
from areal_lite.config.sections import RolloutConfig
from areal_lite.config.suggestion import suggestion
from areal_lite.data.encode import decoder, load_tokenizer
from areal_lite.errors import ConfigError, EngineError
from areal_lite.node import out_of_memory
from areal_lite.rollout.engine import Interrupt, Sampling
from areal_lite.rollout.engine_process import EngineErrors, in_a_line
from areal_lite.rollout.engine_settings import engine_arguments, engine_environment, own_arguments
from areal_lite.types import Float32, Sample, StopReason, VersionSpan

T = TypeVar("T")

_LIVENESS_SLICE_S = 0.5
"""How often a pending call checks that the engine is alive: vLLM never fails a pending `collective_rpc`."""
_RESET_TIMEOUT_S = 10.0
_RESET_POLL_S = 0.005


class VllmEngine:
    """One vLLM engine with exact version stamps, pause and resume, and weight transfer."""

    def __init__(
        self,
        llm: Any,
        tokenizer: Any,
        progress: Any,
        *,
        text_of: Callable[[Sequence[int]], str],
        errors: EngineErrors,
        is_on_cpu: bool,
    ) -> None:
        self.tokenizer = tokenizer
        self.text_of = text_of
        """From a completion's token ids to its text."""
        self.context_tokens = self.cached_tokens = 0
        """Tokens of all contexts so far, and those of them that were in the prefix cache."""
        self._llm, self._progress, self._errors, self._is_on_cpu = llm, progress, errors, is_on_cpu
        self._request_numbers = itertools.count()
        self._tokens_before = 0
        self._closed = False

    @classmethod
    async def start(cls, config: Config, *, model_folder: str) -> Self:
        """Start the engine core and load the model.

        Args:
            config: The recipe; sections `model`, `rollout`, `weights`, `run` and `verifier` are read.
            model_folder: A Hugging Face model folder.

        Raises:
            EngineError: vLLM could not start; its message is quoted, or that of the process that failed.
        """
        errors = EngineErrors()
        _set_environment(config, errors)
        logging.getLogger("vllm.v1.engine.async_llm").addFilter(_without_traceback_of_death)
        from vllm.envs import enable_envs_cache
        from vllm.utils.gc_utils import freeze_gc_heap
        from vllm.v1.engine.async_llm import AsyncLLM

        progress = _progress_logger_class()
        try:
            with errors.gathered():
                llm = AsyncLLM.from_engine_args(_engine_args(config, model_folder), stat_loggers=[progress])
            tokenizer = load_tokenizer(model_folder, config.model)
            text_of = decoder(tokenizer, model_folder, skip_special_tokens=config.verifier.skip_special_tokens)
            engine = cls(llm, tokenizer, progress, text_of=text_of, errors=errors, is_on_cpu=config.run.device == "cpu")
            await engine.stamp(0)
            # The first request pays for vLLM's warm-up, before anything is measured or has a deadline.
            await engine.generate([tokenizer.eos_token_id or 0], Sampling(max_new_tokens=2, temperature=0.0))
            # As vLLM's own servers do: spare the garbage collector what stays for good, and each step many look-ups.
            freeze_gc_heap()
            enable_envs_cache()
        except Exception as error:
            cause = errors.first() or in_a_line(error)
            raise EngineError(f"vLLM must start on {model_folder}, got {cause}{out_of_memory()}") from error
        errors.clear()
        return engine

    @property
    def tokens_generated(self) -> int:
        """Output tokens since the start or the last `reset`, those of running samples included."""
        return int(self._progress.tokens) - self._tokens_before

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Sample:
        """Complete one prompt; cancelling the task ends the request.

        Raises:
            EngineError: The engine died, or returned something other than a finished completion.
        """
        output = await self._final(prompt_ids, sampling.fields)
        self.context_tokens += len(prompt_ids)
        self.cached_tokens += output.num_cached_tokens or 0
        completion = output.outputs[0]
        if completion.finish_reason not in ("stop", "length") or not completion.token_ids:
            raise EngineError(f"a completion must end with stop or length, got {completion.finish_reason!r}")
        token_ids, routes = np.asarray(completion.token_ids, dtype=np.int32), completion.routed_experts
        # For tokens drawn before an interrupt vLLM returns the experts of that time, not those of the second prefill.
        if routes is not None and len(routes) != len(prompt_ids) + len(token_ids) - 1:
            raise EngineError(
                f"vLLM must return the experts of all {len(prompt_ids)} + {len(token_ids)} tokens but the last, got "
                f"{len(routes)}. Fix: set rollout.replay_routes=false"
            )
        spans = [
            VersionSpan(version=int(span.version), start=span.start, end=span.end)
            for span in completion.weight_versions
        ]
        positions = zip(completion.logprobs, completion.token_ids, strict=True)
        is_stop_string = isinstance(completion.stop_reason, str)
        return Sample(
            token_ids=token_ids,
            logprobs=np.array([by_token[token].logprob for by_token, token in positions], dtype=np.float32),
            spans=tuple(spans),
            stop_reason=StopReason.STRING if is_stop_string else StopReason(completion.finish_reason),
            text=self.text_of(completion.token_ids),
            routes=routes,
        )

    async def score(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> tuple[Float32, Any]:
        """Score given output tokens by a fresh prefill, at temperature 1.

        Returns:
            [T] their log-probabilities, and the experts chosen, as `Sample.routes`; None if vLLM returns none.
        """
        fields = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        tokens = [*map(int, prompt_ids), *map(int, output_ids)]
        output = await self._final(tokens, fields)
        start = len(prompt_ids)
        values = [output.prompt_logprobs[start + i][int(token)].logprob for i, token in enumerate(output_ids)]
        routes = output.outputs[0].routed_experts
        return np.array(values, dtype=np.float32), None if routes is None else routes[: len(tokens) - 1]

    async def pause(self, interrupt: Interrupt) -> None:
        """Stop generating, as `rollout.interrupt` has it: `drain` lets running samples finish first.

        `recompute` and `drain` also drop the caches; `keep_kv` keeps them (prefix caching is off then, so that no new
        request can start from a cache of older weights).
        """
        mode = "wait" if interrupt == "drain" else "keep"
        # Not `llm.pause_generation`: it adds a fixed sleep of 20 ms that vLLM itself calls unnecessary.
        await self._guarded(self._llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=interrupt != "keep_kv"))

    async def resume(self) -> None:
        """Generate again."""
        await self._guarded(self._llm.resume_generation())

    async def reset(self) -> None:
        """End every request, drop every cache and the token count, and stay paused; weights and version are kept.

        Raises:
            EngineError: A request does not end.
        """
        await self._guarded(self._until_empty())
        self._tokens_before = int(self._progress.tokens)

    async def _until_empty(self) -> None:
        deadline = time.monotonic() + _RESET_TIMEOUT_S
        while True:
            # Repeatedly: a request may be on its way to the engine core while those before it are ended.
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
        """Make one call of vLLM's weight-transfer protocol."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

        requests = {
            "init_weight_transfer_engine": WeightTransferInitRequest,
            "update_weights": WeightTransferUpdateRequest,
        }
        arguments = [requests[method](argument or {})] if method in requests else []
        await self._guarded(getattr(self._llm, method)(*arguments))

    async def parameter_squares(self) -> Any:
        """Return the fingerprints of each process's parameters, for `weights/families.py`."""
        return await self._guarded(self._llm.collective_rpc("parameter_squares"))

    def raise_if_dead(self) -> None:
        """Check that the engine core is alive.

        Raises:
            EngineError: It died.
        """
        if self._has_died:
            raise self._died()

    @property
    def _has_died(self) -> bool:
        return bool(self._llm.errored)

    async def close(self) -> None:
        """Stop the engine core; idempotent.

        vLLM waits up to 5 s while it cleans up. On a CPU there is nothing to clean up but memory, and it is killed.
        """
        from vllm.envs import disable_envs_cache

        if not self._closed:
            self._closed = True
            gc.unfreeze()
            disable_envs_cache()
            self._llm.shutdown(timeout=0.0 if self._is_on_cpu else None)
            # Its `__del__` calls this again, perhaps at interpreter exit, when its module is gone.
            self._llm.shutdown = lambda: None

    async def _final(self, prompt_ids: Sequence[int], fields: dict[str, Any]) -> Any:
        """Return vLLM's output of a request, given fields of `SamplingParams`."""
        request_id, params = str(next(self._request_numbers)), request_params(fields)
        final = None
        try:
            prompt = {"prompt_token_ids": list(prompt_ids)}
            async for output in self._llm.generate(prompt, params, request_id):
                final = output
        except Exception as error:
            if self._llm.errored:
                raise self._died() from error
            raise
        return final

    async def _guarded(self, call: Awaitable[T]) -> T:
        """Await a call of the engine; raise when the engine dies."""
        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=_LIVENESS_SLICE_S)
                if not task.done():
                    self.raise_if_dead()
        finally:
            task.cancel()
        if task.exception() is not None and self._has_died:
            raise self._died() from task.exception()  # of many kinds
        return task.result()

    def _died(self) -> EngineError:
        cause = f" of {error}" if (error := self._errors.first()) else ""
        return EngineError(f"the engine-core process died{cause}{out_of_memory()}; see the worker's log")


def _without_traceback_of_death(record: logging.LogRecord) -> bool:
    """Keep vLLM's line about an engine core that died, without a traceback that only shows which task waited for it."""
    from vllm.v1.engine.exceptions import EngineDeadError

    if record.exc_info and isinstance(record.exc_info[1], EngineDeadError):
        record.exc_info = None
    return True


def check_engine_arguments(config: Config) -> None:
    """Compare vLLM's arguments and parsers in `rollout` with what vLLM takes; imports vLLM only if there are any.

    Raises:
        ConfigError: Names that vLLM does not know or areal-lite sets, or values of a wrong type; a line per mistake.
    """
    if mistakes := [*_argument_mistakes(config), *_parser_mistakes(config.rollout), *_route_mistakes(config)]:
        raise ConfigError("\n".join(mistakes))


def _route_mistakes(config: Config) -> Iterable[str]:
    if config.rollout.replay_routes and config.run.device == "cpu":
        yield "rollout.replay_routes needs engines on GPUs, as vLLM's CPU build returns no experts; got run.device=cpu"


def _parser_mistakes(rollout: RolloutConfig) -> Iterable[str]:
    tool_parser = rollout.tool_parser
    if tool_parser is not None and is_own_code(tool_parser):
        tool_parser = None  # a function, which is checked with the recipe's others
    if tool_parser is None and rollout.reasoning_parser is None:
        return
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for kind, name, manager in (
        ("tool", tool_parser, ToolParserManager),
        ("reasoning", rollout.reasoning_parser, ReasoningParserManager),
    ):
        known = manager.list_registered()
        if name is not None and name not in known:
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
            yield f"{place} must not be set, as areal-lite sets it (from rollout, model, weights, run.device)"
        elif name not in known:
            yield f"{place} is none of vLLM's AsyncEngineArgs{suggestion(name, known.keys() - own)}"
        else:
            try:
                TypeAdapter(known[name]).validate_python(value)
            except ValidationError as error:
                yield from explained(error, RolloutConfig, prefix=f"{place}.")
            except (PydanticUserError, NameError):
                continue  # pydantic cannot resolve vLLM's annotation: vLLM checks the value when it starts


def request_params(fields: dict[str, Any]) -> Any:
    """Return vLLM's parameters of one request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, skip_clone=True, **fields)


def _set_environment(config: Config, errors: EngineErrors) -> None:
    """Set what vLLM and its processes read from the environment."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.update(engine_environment(config) | errors.environment)


def _engine_args(config: Config, model_folder: str) -> Any:
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    arguments = engine_arguments(config, model_folder=model_folder)
    transfer = WeightTransferConfig(backend=config.weights.transport)
    return AsyncEngineArgs(weight_transfer_config=transfer, **arguments)


def _progress_logger_class() -> Any:
    """Return a vLLM stat logger that counts generated tokens, on the class so that the count can be read.

    vLLM accepts it in place of its Prometheus logger, whose figures nothing would read.
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
