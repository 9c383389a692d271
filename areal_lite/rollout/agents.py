"""Agents: programs that call a model through an API they know, trained unchanged.

`async def agent(task, llm)` is an ordinary function, sync or async. It sends its requests to `llm.base_url`, where
`endpoint.py` answers them, and returns its reward.
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from areal_lite.rollout.endpoint import Endpoint
from areal_lite.rollout.episode import EpisodeEngine
from areal_lite.rollout.sessions import Session
from areal_lite.rollout.workflows import call
from areal_lite.types import Sample
from areal_lite.verify.protocol import read_result
from areal_lite.verify.result import VerifyResult
from areal_lite.verify.worker import score_of

if TYPE_CHECKING:
    from openai import AsyncOpenAI


@dataclass
class Llm:
    """The model, as one rollout of an agent sees it: an OpenAI-compatible API of its own."""

    base_url: str
    """For OpenAI's SDKs."""
    api_key: str
    anthropic_base_url: str
    """For Anthropic's SDKs."""
    model: str = "policy"
    """Any other name works as well."""
    endpoint: Endpoint | None = None
    """Answers the client's plain calls in its own event loop; None = all go over HTTP."""

    @cached_property
    def client(self) -> "AsyncOpenAI":
        """A client, closed when the agent ends."""
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        # Without TLS, as loading certificates takes longer than many agents run, and without proxies. No connection is
        # kept: an agent may use the client in event loops of its own, which end before the client is closed.
        http, headers = DefaultAsyncHttpxClient(verify=False, trust_env=False), {"connection": "close"}
        client = AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, http_client=http, default_headers=headers)
        if self.endpoint is not None:
            client.post = partial(self._post, self.endpoint, client.post)  # type: ignore[method-assign]
        return client

    async def _post(self, endpoint: Endpoint, post: Any, path: str, *, cast_to: Any, **request: Any) -> Any:
        """Do what `client.post` does, but a plain call without HTTP, which costs more than all the rest.

        A call that fails here is sent over HTTP as a retry, so that the SDK raises its own error.
        """
        options = request.get("options", {})
        is_plain = options.keys() <= {"security"} and not request.get("stream") and hasattr(cast_to, "model_validate")
        if is_plain and endpoint.is_in_this_loop:
            session, timeout = self.anthropic_base_url.rpartition("/")[2], self.client.timeout
            with suppress(Exception):
                body = json.dumps(request.get("body"))
                request["options"] = {**options, "headers": {"x-stainless-retry-count": "1"}}
                async with asyncio.timeout(getattr(timeout, "read", timeout)):  # type: ignore[arg-type]
                    answer = await endpoint.answer(session, self.api_key, path.strip("/"), body)
                return cast_to.model_validate(answer)
        return await post(path, cast_to=cast_to, **request)

    async def close(self) -> None:
        """Close the client, if there is one."""
        if "client" in vars(self):
            await self.client.close()


async def play(
    function: Callable[..., Any],
    endpoint: Endpoint,
    engine: EpisodeEngine,
    task: Mapping[str, Any],
    max_new_tokens: int,
    /,
    **arguments: Any,
) -> Sample:
    """Run an agent once.

    Args:
        function: Called as `function(task, llm, **arguments)`.
        engine: For this rollout alone, without a prompt.
        task: The data row.
        max_new_tokens: Limit of one call.

    Raises:
        ValueError: It made no call, or returned something other than a reward.
    """
    session = Session(engine, max_new_tokens=max_new_tokens, parse=endpoint.parser(engine.tokenizer))
    async with endpoint.serving(session) as (root, key):
        llm = Llm(base_url=f"{root}/v1", api_key=key, anthropic_base_url=root, endpoint=endpoint)
        try:
            result = await call(function, task, llm, **arguments)
        finally:
            await llm.close()
    return session.sample() if result is None else _scored(session, result)


def is_agent(function: Callable[..., Any]) -> bool:
    """Tell agents, `(task, llm, ...)`, from workflows, `(engine, row, ...)`."""
    return list(inspect.signature(function).parameters)[1:2] == ["llm"]


def _scored(session: Session, result: Any) -> Sample:
    sample, calls, returned = session.sample(), None, result
    if isinstance(result, Mapping):
        calls = result.get("calls")
        parts = {name: value for name, value in result.items() if name not in ("reward", "calls")}
        result = VerifyResult(result.get("reward"), parts=parts)
    reply = read_result(result, completion=sample.text)
    if reply.failure is not None:
        raise ValueError(
            f"an agent must return its reward (a number, or a dict of numbers with one named reward), or None to leave "
            f"it to the verifier; got {returned!r:.80} ({reply.detail})"
        )
    score = score_of(reply, sample, session.engine.text_of)
    return sample.scored(score if calls is None else session.credited(score, calls))
