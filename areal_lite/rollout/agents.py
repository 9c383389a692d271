"""Agents: programs that speak to the model through an API they know, trained as they are.

`async def agent(task, llm)` is an ordinary function, sync or async, which sends its requests to `llm.base_url`, where
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
    """The model as one rollout of an agent sees it: an OpenAI-compatible API of its own."""

    base_url: str
    """For OpenAI's SDKs."""
    api_key: str
    anthropic_base_url: str
    """For Anthropic's SDKs."""
    model: str = "policy"
    """Any other name is as good."""
    endpoint: Endpoint | None = None
    """Answers the client's plain calls in this event loop; None = over HTTP, like all others."""

    @cached_property
    def client(self) -> "AsyncOpenAI":
        """A client, ready to use, which is closed when the agent ends."""
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        # Without TLS, whose certificates take longer to read than many an agent takes in all, and without proxies.
        http = DefaultAsyncHttpxClient(verify=False, trust_env=False)
        client = AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, http_client=http)
        if self.endpoint is not None:
            client.post = partial(self._post, self.endpoint, client.post)  # type: ignore[method-assign]
        return client

    async def _post(self, endpoint: Endpoint, post: Any, path: str, *, cast_to: Any, **asked: Any) -> Any:
        """Do what `client.post` does, without HTTP, which costs more than all the rest, if nothing of it is asked for.

        What comes to no answer is sent again as a retry, and the SDK tells why.
        """
        options = asked.get("options", {})
        if options.keys() <= {"security"} and not asked.get("stream") and hasattr(cast_to, "model_validate"):
            name, timeout = self.anthropic_base_url.rpartition("/")[2], self.client.timeout
            with suppress(Exception):
                body = json.dumps(asked.get("body"))
                asked["options"] = {**options, "headers": {"x-stainless-retry-count": "1"}}
                async with asyncio.timeout(getattr(timeout, "read", timeout)):  # type: ignore[arg-type]
                    return cast_to.model_validate(await endpoint.answer(name, self.api_key, path.strip("/"), body))
        return await post(path, cast_to=cast_to, **asked)

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
        function: The agent's, called as `function(task, llm, **arguments)`.
        engine: Of this rollout alone, without a prompt.
        task: The data row.
        max_new_tokens: Of one call at most.

    Raises:
        ValueError: It called nothing, or returned something else than a reward.
    """
    session = Session(engine, max_new_tokens=max_new_tokens, parse=endpoint.parser(engine.tokenizer))
    async with endpoint.serving(session) as (root, key):
        # An agent in a thread may bring an event loop of its own.
        within = endpoint if inspect.iscoroutinefunction(function) else None
        llm = Llm(base_url=f"{root}/v1", api_key=key, anthropic_base_url=root, endpoint=within)
        try:
            result = await call(function, task, llm, **arguments)
        finally:
            await llm.close()
    return session.sample() if result is None else _scored(session, result)


def is_agent(function: Callable[..., Any]) -> bool:
    """Whether a function takes a task and an `llm`."""
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
            f"an agent must return its reward, a number or a dict of numbers with one named reward, or None to leave "
            f"it to the verifier; got {returned!r:.80} ({reply.detail})"
        )
    score = score_of(reply, sample, session.engine.text_of)
    return sample.scored(score if calls is None else session.credited(score, calls))
