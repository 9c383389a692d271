"""Agents of the integration tests, named in recipes by file and function."""

from collections.abc import Mapping
from typing import Any

TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
"""For a model that knows digits alone."""


async def asks_twice(task: Mapping[str, Any], llm: Any) -> dict[str, float]:
    """Go on from an answer once as it was, and once with another first question: two ways through one rollout."""

    async def ask(*messages: dict[str, Any]) -> dict[str, Any]:
        response = await llm.client.chat.completions.create(model=llm.model, messages=messages, max_tokens=12)
        return {"role": "assistant", "content": response.choices[0].message.content}

    first, other, again = ({"role": "user", "content": text} for text in (task["prompt"], "7", "12"))
    said = await ask(first)
    text = (await ask(other, said, again))["content"]
    text += (await ask(first, said, again))["content"]
    return {"reward": sum(character in task["answer"] for character in text) / (len(text) + 1), "length": len(text)}
