"""One rollout of an agent: a tree of calls, and the sample that it becomes. Nothing here knows HTTP.

A call whose messages go on from what an earlier one was answered is generated behind the *exact* tokens of that one;
any other begins a branch. So nothing that was sampled is ever tokenised again, and each token trains once.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from areal_lite.data.encode import Messages, encode_text, render_chat
from areal_lite.rollout.dialogue import ENVIRONMENT, ids_behind, text_behind
from areal_lite.rollout.episode import EpisodeEngine, Turn
from areal_lite.types import Sample, Score, StepReward, StopReason

Message = dict[str, Any]

Parse = Callable[[str, Messages], Message]
"""From what the model said, special tokens included, and the tools it was told of, to the assistant's message."""


_MOST_ANSWERS = 128
RENDERERS = ThreadPoolExecutor(2, thread_name_prefix="render")
"""Chats are rendered and tokenised here: a long one must not hold up the event loop."""


class ContextTooLongError(ValueError):
    """A call's messages leave no room for an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a call asks of the model."""

    messages: tuple[Message, ...] = ()
    """As `normalised`; empty where it is plain text."""
    prompt: str = ""
    """Plain text; empty for messages."""
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    """Of the answer, which is never longer than a session's `max_new_tokens` and the room that is left."""
    stop: tuple[str, ...] = ()
    num: int = 1
    """How many answers, at most 128."""
    is_single_call: bool = False
    """Whether an answer may call one tool at most: further calls are not passed on."""

    def __post_init__(self) -> None:
        if not 1 <= self.num <= _MOST_ANSWERS:
            raise ValueError(f"n must be between 1 and {_MOST_ANSWERS}, got {self.num}. Fix: send several requests")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}. Fix: raise it, or leave it out")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placed:
    """A call whose place in the tree is known."""

    asked: Asked
    parent: "Call | None"
    """The call whose tokens begin `context`."""
    context: tuple[int, ...]
    """Tokens that its answers are generated behind."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One answer of the model's to an agent."""

    asked: Asked
    context: tuple[int, ...]
    """Tokens that it was generated behind."""
    turn: Sample
    answer: Message
    """What the agent was told."""
    parent: "Call | None"
    """The call whose tokens begin `context`."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The context, and what was generated behind it."""
        return (*self.context, *self.turn.token_ids.tolist())


class Session:
    """The calls of one rollout."""

    def __init__(self, engine: EpisodeEngine, *, max_new_tokens: int, parse: Parse | None = None) -> None:
        """Begin a rollout.

        Args:
            engine: Of this rollout alone, without a prompt, with room for the model's whole context.
            max_new_tokens: Of one call at most.
            parse: Finds tool calls and reasoning in what the model says; None = it is plain text.
        """
        self.engine = engine
        self._max_context, self._max_new_tokens, self._parse = engine.room, max_new_tokens, parse
        self._calls: list[Call] = []

    @property
    def max_bytes(self) -> int:
        """Largest body of a request that can be a call: no text that fits into the model's context takes more."""
        return 2**18 + 64 * self._max_context

    async def place(self, asked: Asked) -> Placed:
        """Render and tokenise what a call asks, away from the event loop.

        Raises:
            ContextTooLongError: No room is left.
            ValueError: The model has no chat template, or it refuses the messages, or does not show the tools, or the
                tokenizer has no token for a character.
        """
        if len(asked.messages) > self._max_context:  # each is a token at least
            raise self._too_long(f"{len(asked.messages)} messages")
        find = self._text_context if asked.prompt else self._chat_context
        parent, context = await asyncio.get_running_loop().run_in_executor(RENDERERS, find, asked)
        if len(context) >= self._max_context:
            raise self._too_long(f"{len(context)} tokens before the answer")
        return Placed(asked=asked, parent=parent, context=context)

    async def complete(self, placed: Placed) -> list[Call]:
        """Have the model answer; what the agent got to see of it must then be given to `keep`."""
        return list(await asyncio.gather(*(self._answer(placed) for _ in range(placed.asked.num))))

    async def _answer(self, placed: Placed) -> Call:
        asked = placed.asked
        limit = min(self._max_new_tokens, asked.max_tokens or self._max_new_tokens)
        turn = await self.engine.generate(placed.context, max_new_tokens=limit, stop=asked.stop)
        if self._parse is None or asked.prompt:
            answer: Message = {"role": "assistant", "content": _before(self._shown(turn), asked.stop)}
        else:
            own = turn.token_ids[: -1 if turn.stop_reason is StopReason.STOP else None]
            said = str(self.engine.tokenizer.decode(own.tolist()))
            answer = self._parse(_before(said, asked.stop), asked.tools)
        if asked.is_single_call and "tool_calls" in answer:
            answer["tool_calls"] = answer["tool_calls"][:1]
        return Call(asked=asked, context=placed.context, turn=turn, answer=answer, parent=placed.parent)

    def _shown(self, turn: Turn) -> str:
        """Return a turn's text as the APIs show it: without special tokens, which verifiers see."""
        return str(self.engine.tokenizer.decode(turn.token_ids.tolist(), skip_special_tokens=True))

    def _too_long(self, got: str) -> ContextTooLongError:
        # The words by which clients such as litellm recognise it.
        return ContextTooLongError(
            f"prompt is too long: this model's maximum context length is {self._max_context} tokens with the answer, "
            f"got {got}. Fix: shorten the messages, or raise model.max_context={self._max_context}"
        )

    def keep(self, calls: Iterable[Call]) -> None:
        """Take calls into the rollout, as the agent has seen their answers."""
        self._calls += calls

    def sample(self) -> Sample:
        """Join the calls into one sample: every way from a beginning to an end is one sequence, its own or a branch's.

        The last call's way comes first, so that a verifier sees how the rollout ended. What ways share trains in the
        first of them, and is a prompt in the others.

        Raises:
            ValueError: There is no call.
        """
        if not self._calls:
            raise ValueError(
                "an agent must call the model at least once, it did not: send its requests to llm.base_url"
            )
        last, parents = self._calls[-1], {id(call.parent) for call in self._calls}
        ends = [last, *(call for call in self._calls if id(call) not in parents and call is not last)]
        ways, seen = [], set[int]()
        for end in ends:
            ways.append([call for call in _lineage(end) if id(call) not in seen])
            seen.update(map(id, ways[-1]))
        first, *branches = map(self._joined, ways)
        return replace(first, messages=tuple(_messages(ways[0])), branches=tuple(branches))

    def credited(self, score: Score, values: Sequence[float]) -> Score:
        """Add what each call earned: where it ends, if it lies on the last call's way, else to the reward of all ways.

        Raises:
            ValueError: There is not one number for each call.
        """
        if len(values) != len(self._calls):
            raise ValueError(f"calls must be a number for each of the {len(self._calls)} answered, got {values!r:.80}")
        way = _lineage(self._calls[-1])
        ends = {id(call): len(call.tokens) - len(way[0].context) - 1 for call in way}
        earned = [(ends.get(id(call)), float(value)) for call, value in zip(self._calls, values, strict=True)]
        steps = tuple(StepReward(token=end, value=value) for end, value in earned if end is not None)
        others = sum(value for end, value in earned if end is None)
        return replace(score, reward=(score.reward or 0.0) + others, step_rewards=steps)

    def _joined(self, calls: Sequence[Call]) -> Sample:
        turns: list[Turn] = []
        end = behind = calls[0].context
        for call in calls:
            if between := call.context[len(end) :]:
                turns.append(self.engine.given(between))
            turns.append(call.turn)
            end = call.tokens
        joined = self.engine.join(turns, with_messages=False, behind=behind)
        return replace(joined, prompt_ids=behind)

    def _chat_context(self, asked: Asked) -> tuple[Call | None, tuple[int, ...]]:
        tokenizer = self.engine.tokenizer
        if tokenizer.chat_template is None:
            raise ValueError(
                "chat messages need a model with a chat template, this one has none: send plain text to /completions"
            )
        text = render_chat(asked.messages, tokenizer, tools=asked.tools)
        if asked.tools and text == render_chat(asked.messages, tokenizer):
            raise ValueError(
                "the model's chat template does not show tools to the model: it writes the same text without them. "
                "Fix: use a model whose template does, or describe the tools in a message and send none"
            )
        compared = list(map(_compared, asked.messages))
        for call in sorted(self._calls[::-1], key=lambda call: -len(call.asked.messages)):
            before = [*map(_compared, call.asked.messages), _compared(normalised(call.answer))]
            if not call.asked.messages or call.asked.tools != asked.tools or compared[: len(before)] != before:
                continue
            new = asked.messages[len(before) :]
            try:
                behind = text_behind(call.asked.messages, new, tokenizer=tokenizer, tools=asked.tools)
            except ValueError:  # a template that wants to see the tool calls that its answers belong to
                break
            if text.endswith(behind):  # else it writes what is behind in another way, as the answer was another
                end = int(call.turn.token_ids[-1]) if call.turn.stop_reason is StopReason.STOP else None
                return call, (*call.tokens, *ids_behind(behind, tokenizer=tokenizer, end=end))
        return None, tuple(encode_text(text, tokenizer))

    def _text_context(self, asked: Asked) -> tuple[Call | None, tuple[int, ...]]:
        prompt = asked.prompt
        for call in sorted(self._calls[::-1], key=lambda call: -len(call.asked.prompt)):
            said = call.asked.prompt + self._shown(call.turn)
            # The same prompt is one asked again, behind an empty answer too.
            if call.asked.prompt and prompt.startswith(said) and prompt != call.asked.prompt:
                return call, (*call.tokens, *encode_text(prompt[len(said) :], self.engine.tokenizer))
        return None, tuple(encode_text(prompt, self.engine.tokenizer, add_special_tokens=True))


def normalised(message: Mapping[str, Any]) -> Message:
    """Return a chat message as templates want it: its content one text, arguments of tool calls no JSON but values.

    Raises:
        ValueError: It holds more than text.
    """
    content = message.get("content") or ""
    if not isinstance(content, str):
        kinds = {part.get("type") if isinstance(part, Mapping) else type(part).__name__ for part in content}
        others = kinds - {"text", "input_text", "output_text"}
        if others:
            raise ValueError(f"the content of a message must be text, got parts of type {', '.join(map(str, others))}")
        content = "\n".join(part["text"] for part in content)
    role = "system" if message["role"] == "developer" else message["role"]
    kept = {name: value for name, value in message.items() if value and name not in ("content", "role")}
    if calls := kept.get("tool_calls"):
        kept["tool_calls"] = [{**call, "function": _with_values(call["function"])} for call in calls]
    return {"role": role, "content": content, **kept}


def _with_values(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments") or {}
    try:
        return {**function, "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}
    except ValueError:
        return dict(function)


def _compared(message: Message) -> object:
    """Return what tells a message from others: of an assistant's its text and calls, as clients leave out the rest."""
    if message["role"] != "assistant":
        return message
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message["content"].strip(), calls


def _before(text: str, stop: Sequence[str]) -> str:
    return text[: min((place for end in stop if (place := text.find(end)) >= 0), default=len(text))]


def _lineage(call: Call) -> list[Call]:
    found = [call]
    while (parent := found[-1].parent) is not None:
        found.append(parent)
    return found[::-1]


def _messages(calls: Sequence[Call]) -> Iterable[dict[str, str]]:
    """Yield what was said behind the first call's messages, tool calls as the model wrote them."""
    for number, call in enumerate(calls):
        before = calls[number - 1]
        if number and call.asked.prompt:
            yield {"role": ENVIRONMENT, "content": call.asked.prompt[len(before.asked.prompt + before.turn.text) :]}
        for message in call.asked.messages[len(before.asked.messages) + 1 :] if number else ():
            yield {"role": message["role"], "content": message["content"]}
        yield {"role": "assistant", "content": call.turn.text}
