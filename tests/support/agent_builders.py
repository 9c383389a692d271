"""Agents in the tests: run them on an engine that gives the answers a test wants."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import vllm.entrypoints.openai.chat_completion.protocol  # noqa: F401  imported here, it costs no test time
from chat_builders import CHATML, make_tokenizer
from episode_builders import UNCUT, Speaker, given_mask, make_prompt, run

from areal_lite.config.sections import RolloutConfig
from areal_lite.rollout.endpoint import Endpoint
from areal_lite.rollout.engine import Sampling
from areal_lite.rollout.runner import Workflows
from areal_lite.types import Sample

TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def train(
    agent: Callable[..., Any],
    answers: Sequence[str] | Callable[[str], str],
    *,
    template: str | None = CHATML,
    sampling: Sampling = UNCUT,
    max_context: int = 4000,
    turn_timeout_s: float = 30.0,
    rollout: Mapping[str, Any] | None = None,
    endpoint: Mapping[str, float] | None = None,
    engine: Speaker | None = None,
    num: int = 1,
    row: Mapping[str, Any] | None = None,
) -> tuple[list[Sample | Exception], Speaker]:
    """Run an agent, `num` times at once, with what the model answers; returns samples or errors."""
    tokenizer = make_tokenizer(template or CHATML)
    tokenizer.chat_template = template
    prompt = make_prompt(answer="12", **(row or {}))
    speaker = engine or Speaker(answers, tokenizer=tokenizer)

    async def scenario() -> list[Sample | Exception]:
        workflows = Workflows(
            default="own",
            loaded={"own": (agent, {})},
            turn_timeout_s=turn_timeout_s,
            max_context=max_context,
            endpoint=Endpoint(RolloutConfig(**(rollout or {})), **(endpoint or {})),
        )
        try:
            rollouts = (
                workflows.sample(speaker, prompt, sampling=sampling, seed_of=lambda call: 100 + call)
                for _ in range(num)
            )
            return list(await asyncio.gather(*rollouts, return_exceptions=True))  # type: ignore[arg-type]
        finally:
            await workflows.endpoint.close()

    return run(scenario), speaker


def trained(agent: Callable[..., Any], answers: Any, **options: Any) -> tuple[Sample, Speaker]:
    (sample,), speaker = train(agent, answers, **options)
    if isinstance(sample, BaseException):
        raise sample
    return sample, speaker


async def say(llm: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    """Ask, and append the answer to the messages."""
    response = await llm.client.chat.completions.create(model=llm.model, messages=messages, **options)
    message = response.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    return message.content or ""


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def own(sample: Sample) -> list[int]:
    """Tokens of all sequences that train."""
    return [
        int(token)
        for sequence in sample.sequences
        for token, given in zip(sequence.token_ids, given_mask(sequence), strict=True)
        if not given
    ]


HERMES = {"rollout": {"tool_parser": "hermes"}, "template": TOOLS_TEMPLATE}


CLAUDE_ADD = {"name": "add", "description": "Add.", "input_schema": ADD["function"]["parameters"]}


async def post(
    llm: Any, api: str, body: Mapping[str, Any] | bytes, *, timeout: float | httpx.Timeout = 120.0, **headers: str
) -> httpx.Response:
    """Send a request over a socket, as it is."""
    content = body if isinstance(body, bytes) else json.dumps({"model": "m", **body})
    async with httpx.AsyncClient(timeout=timeout, trust_env=False) as client:
        return await client.post(
            f"{llm.base_url}/{api}", content=content, headers={"x-api-key": llm.api_key, **headers}
        )
