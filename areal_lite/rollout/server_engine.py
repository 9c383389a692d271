"""An engine that somebody else runs: a vLLM server, over its HTTP endpoints for tokens and for weights.

`ServerEngine` answers as `VllmEngine` does. A task reads the server's metrics twice a second: it counts the tokens, and
when the server is gone, every pending call raises. Versions are stamped with a name that only this engine knows, so
that tokens of a server that was restarted meanwhile, or that serves another run too, are refused.
"""

import asyncio
import contextlib
import json
import os
import secrets
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Self

from areal_lite.config.recipe import Config
from areal_lite.data.encode import decoder, load_tokenizer
from areal_lite.errors import ConfigError, EngineError
from areal_lite.rollout.engine import Interrupt, Sampling
from areal_lite.rollout.engine_process import EngineErrors
from areal_lite.rollout.engine_settings import option, server_arguments, server_command
from areal_lite.rollout.vllm_engine import VllmEngine

_POLL_S = 0.5
"""Between looks at the metrics."""
_SILENT_S = 30.0
"""A server whose metrics take longer is given up."""
_START_SHARE = 0.8
"""Of `run.start_timeout_s`: the wait for a server must end, and be explained, before the worker's start is given up."""
_COUNTERS = ("vllm:generation_tokens_total", "vllm:prefix_cache_hits_total")
_SECTIONS = ("model_config", "cache_config", "parallel_config", "scheduler_config")
"""Of what a server says about itself, with the settings that are compared:"""
_COMPARED = (
    "dtype", "max_model_len", "max_num_seqs", "logprobs_mode", "tensor_parallel_size", "pipeline_parallel_size",
    "data_parallel_size", "worker_extension_cls", "enable_prefix_caching", "enable_chunked_prefill",
    "weight_transfer_config",
)  # fmt: skip
_FIXES = {
    401: "set rollout.server_key_env to the name of the variable that holds the server's --api-key",
    403: "start the server with --enable-scale-out",
    404: "start the server with the environment variable VLLM_SERVER_DEV_MODE=1",
}


class ServerEngine(VllmEngine):
    """A vLLM server with exact version stamps, pause and resume, and weight transfer."""

    def __init__(self, http: Any, server: str, **parts: Any) -> None:
        counts = SimpleNamespace(tokens=0, cached=0)
        super().__init__(None, progress=counts, errors=EngineErrors(), is_on_cpu=False, **parts)
        self._http, self._server, self._name = http, server, secrets.token_hex(4)
        self._gone = ""
        self._order = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, config: Config, *, model_folder: str, server: str) -> Self:
        """Wait for a server, compare its settings with the recipe, and leave it without requests or open updates.

        Raises:
            ConfigError: The variable with the key is not set.
            EngineError: The server does not answer within `run.start_timeout_s`, or is not started as it must be.
        """
        import aiohttp

        if (variable := config.rollout.server_key_env) is not None and not os.environ.get(variable):
            raise ConfigError(
                f"rollout.server_key_env must name a set variable, got {variable}: export it, and take it to other "
                f"nodes with run.env={{{variable}: null}}"
            )
        tokenizer = load_tokenizer(model_folder, config.model)
        text_of = decoder(tokenizer, model_folder, skip_special_tokens=config.verifier.skip_special_tokens)
        http = aiohttp.ClientSession(
            server,
            headers={"Authorization": f"Bearer {os.environ[variable]}"} if variable else {},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_SILENT_S),
            # uvicorn closes a connection that was idle for 5 s, or that met an error: no other request must meet it.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
        )
        engine = cls(http, server, tokenizer=tokenizer, text_of=text_of)
        try:
            await engine._wait(config, server_command(config, model_folder, server))
            await engine._check(config, model_folder)
        except BaseException:
            await http.close()
            raise
        engine._watching = asyncio.create_task(engine._watch())
        return engine

    async def pause(self, interrupt: Interrupt) -> None:
        """Stop generating, as `VllmEngine.pause` does."""
        await self._pause("wait" if interrupt == "drain" else "keep", clear_cache=interrupt != "keep_kv")

    async def resume(self) -> None:
        """Generate again."""
        await self._guarded(self._ask("/resume"))

    async def reset(self) -> None:
        """End every request, drop every cache and the token count, and stay paused; weights and version are kept."""
        await self._pause("abort")
        self._tokens_before = self._progress.tokens

    async def stamp(self, version: int) -> None:
        """Have the server label every token from now on with this version (invariant I3)."""
        await self._guarded(self._ask("/update_weight_version", {"new_version": f"{self._name}/{version}"}))

    async def weights_call(self, method: str, argument: dict[str, Any] | None = None) -> None:
        """Make one call of vLLM's weight-transfer protocol."""
        keys = {"init_weight_transfer_engine": "init_info", "update_weights": "update_info"}
        async with self._order:  # over HTTP the later of two calls may arrive first
            await self._guarded(self._ask(f"/{method}", {keys[method]: argument or {}} if method in keys else None))

    async def parameter_squares(self) -> Any:
        """Return the fingerprints of each process's parameters, for `weights/families.py`."""
        return (await self._guarded(self._ask("/collective_rpc", {"method": "parameter_squares"})))["results"]

    async def close(self) -> None:
        """Leave the server as it is; idempotent."""
        if self._watching is not None:
            self._watching.cancel()
        await self._http.close()

    @property
    def _has_died(self) -> bool:
        return bool(self._gone)

    def _died(self) -> EngineError:
        return EngineError(self._gone)

    async def _pause(self, mode: str, *, clear_cache: bool = True) -> None:
        await self._guarded(self._ask(f"/pause?mode={mode}&clear_cache={str(clear_cache).lower()}"))

    async def _final(self, prompt_ids: Sequence[int], fields: dict[str, Any]) -> Any:
        request = {"token_ids": list(map(int, prompt_ids)), "sampling_params": fields}
        answer = await self._guarded(self._ask("/inference/v1/generate", request))
        (choice,) = answer["choices"]
        content = (choice["logprobs"] or {}).get("content", ())
        spans = [SimpleNamespace(**span | {"version": self._version(span)}) for span in choice["weight_versions"]]
        logprobs = [{entry["token_id"]: SimpleNamespace(**entry)} for entry in content]
        prompt_logprobs = [
            {int(token): SimpleNamespace(**entry) for token, entry in (entries or {}).items()}
            for entries in answer["prompt_logprobs"] or ()
        ]
        output = SimpleNamespace(**choice | {"weight_versions": spans, "logprobs": logprobs, "routed_experts": None})
        return SimpleNamespace(outputs=[output], prompt_logprobs=prompt_logprobs, num_cached_tokens=0)

    def _version(self, span: dict[str, Any]) -> int:
        name, _, version = span["version"].partition("/")
        if name == self._name and version.isdecimal():
            return int(version)
        self._gone = (
            f"the vLLM server at {self._server} must serve this worker alone, expected tokens of a version that it "
            f"stamped, got {span['version']!r}. The server was restarted, or another worker or run has stamped it"
        )
        raise self._died()

    async def _ask(self, path: str, content: dict[str, Any] | None = None, *, method: str = "POST") -> Any:
        """Make one request; returns the answer's JSON, or of another answer the text.

        Raises:
            EngineError: The server is gone or refuses the request.
            ValueError: The request cannot be served: it is too long, for instance.
        """
        import aiohttp

        try:
            async with self._http.request(method, path, json=content) as response:
                status, text = response.status, await response.text()
        except (aiohttp.ClientError, OSError) as error:
            self._gone = f"the vLLM server at {self._server} is gone: {type(error).__name__}: {error}"
            raise self._died() from error
        if status == 200:
            return json.loads(text) if response.content_type == "application/json" else text
        if status == 400:
            raise ValueError(f"the vLLM server at {self._server} refuses a request: {text[:300]}")
        fix = f" Fix: {_FIXES[status]}" if status in _FIXES else ""
        raise EngineError(f"{path} of the vLLM server at {self._server} must answer, got {status} {text[:500]}.{fix}")

    async def _wait(self, config: Config, command: str) -> None:
        wait_s = _START_SHARE * config.run.start_timeout_s
        deadline = time.monotonic() + wait_s
        while True:
            try:
                async with asyncio.timeout(max(0.1, min(_SILENT_S, deadline - time.monotonic()))):
                    await self._ask("/health", method="GET")
            except (EngineError, ValueError, TimeoutError) as error:
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"a vLLM server must answer at {self._server} within {wait_s:g} s (a share of "
                        f"run.start_timeout_s), got {str(error) or 'no answer':.200}. Fix: start it: {command}"
                    ) from error
                await asyncio.sleep(_POLL_S)
            else:
                self._gone = ""
                return

    async def _check(self, config: Config, model_folder: str) -> None:
        """Compare the server's settings with the recipe's, and have a new server generate.

        One that others have used stays paused until the first publication: its weights may be half of an update.
        """
        known = (await self._ask("/server_info?config_format=json", method="GET"))["vllm_config"]
        found = {name: value for section in _SECTIONS for name, value in known[section].items()}
        found["dtype"] = found["dtype"].removeprefix("torch.")
        found["weight_transfer_config"] = known["weight_transfer_config"]
        wanted = server_arguments(config, model_folder)
        wrong = [name for name in _COMPARED if name in wanted and not _fits(name, found[name], wanted[name])]
        if wrong:
            raise EngineError(
                f"the vLLM server at {self._server} must be started with "
                f"{' '.join(option(name, wanted[name]) for name in wrong)}, got "
                f"{', '.join(f'{name}={found[name]}' for name in wrong)}. Fix: start it again: "
                f"{server_command(config, model_folder, self._server)}"
            )
        await self._pause("abort")
        is_new = (await self._ask("/weight_info", method="GET"))["weight_version"] == "default"
        if is_new:
            await self.resume()
            await self.stamp(0)
            await self.generate([self.tokenizer.eos_token_id or 0], Sampling(max_new_tokens=2, temperature=0.0))
        # An update that a worker left open when it died: the first call fails and closes it, or the second does.
        for call in () if is_new else ("update_weights", "finish_weight_update"):
            with contextlib.suppress(EngineError):
                await self.weights_call(call)
        await self.stamp(-1)  # which no sample may have: tokens from before the first publication are refused
        self._progress.tokens, self._progress.cached = await self._count()
        self._tokens_before = self._progress.tokens
        if not self._tokens_before:
            raise EngineError(
                f"the vLLM server at {self._server} must count its tokens, got none in /metrics. Fix: start it without "
                "--disable-log-stats"
            )

    async def _count(self) -> list[int]:
        """Return the tokens that the server has generated, and those of contexts that its prefix cache had."""
        lines = (await self._ask("/metrics", method="GET")).splitlines()
        return [int(sum(float(line.split()[-1]) for line in lines if line.startswith(name))) for name in _COUNTERS]

    async def _watch(self) -> None:
        """Consumes the server's metrics, produces the counts of tokens; ends when the server is gone."""
        while not self._gone:
            try:
                async with asyncio.timeout(_SILENT_S):
                    self._progress.tokens, cached = await self._count()
                self.cached_tokens += cached - self._progress.cached
                self._progress.cached = cached
            except (EngineError, ValueError, TimeoutError) as error:
                self._gone = self._gone or f"the vLLM server at {self._server} does not answer: {error!r:.300}"
            await asyncio.sleep(_POLL_S)


def _fits(name: str, found: Any, wanted: Any) -> bool:
    if name == "weight_transfer_config":
        return found is not None and bool(found["backend"] == wanted["backend"])
    return bool(found >= wanted) if name in ("max_model_len", "max_num_seqs") else bool(found == wanted)
