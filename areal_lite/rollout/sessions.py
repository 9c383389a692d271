"""One rollout of an agent: a tree of calls, and the sample that it becomes. Nothing here knows HTTP.

A call whose messages continue an earlier answer is generated after the *exact* tokens of that answer; any other call
starts a branch. So nothing that was sampled is ever tokenised again, and each token trains once. For example:

    call 1  [user: plan]                                    a root
    call 2  [user: plan, assistant: edited, user: solve]    a root: a branch of its own, as the history differs
    call 3  [user: plan, assistant: <answer 1>, user: more] continues call 1

The sample is the path 1, 3 with the branch 2.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from areal_lite.data.encode import Messages, Tokenizer, encode_text, render_chat, text_message
from areal_lite.rollout.api_fields import Refusal
from areal_lite.rollout.dialogue import ENVIRONMENT, following_ids, following_text
from areal_lite.rollout.episode import EpisodeEngine, Turn
from areal_lite.types import Sample, Score, StepReward, StopReason

Message = dict[str, Any]

Parse = Callable[[str, Messages], Message]
"""From the model's text, special tokens included, and the tools it was offered, to the assistant's message."""

_MAX_ANSWERS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a call asks of the model: either messages or a prompt."""

    messages: tuple[Message, ...] = ()
    """As returned by `normalised`."""
    prompt: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    """Of each answer, within the session's `max_new_tokens` and the room that is left."""
    stop: tuple[str, ...] = ()
    num: int = 1
    """How many answers."""
    is_single_call: bool = False
    """Whether an answer may call one tool at most: the client does not see further calls."""

    def __post_init__(self) -> None:
        if not 1 <= self.num <= _MAX_ANSWERS:
            raise ValueError(f"n must be between 1 and {_MAX_ANSWERS}, got {self.num}. Fix: send several requests")
        if "" in self.stop:
            raise ValueError(f"stop strings must not be empty, got {list(self.stop)}. Fix: leave the empty one out")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}. Fix: raise it, or leave it out")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placed:
    """A call with its place in the tree."""

    asked: Asked
    context: tuple[int, ...]
    """Tokens that its answers follow."""
    parent: "Call | None"
    """The call whose tokens `context` begins with."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One answer of the model."""

    placed: Placed
    turn: Sample
    answer: Message
    """What the client received."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The context, then the tokens that were generated after it."""
        return (*self.placed.context, *self.turn.token_ids.tolist())


class Session:
    """The calls of one rollout."""

    def __init__(self, engine: EpisodeEngine, *, max_new_tokens: int, parse: Parse | None = None) -> None:
        """Start a rollout.

        Args:
            engine: For this rollout alone, without a prompt, with room for the model's whole context.
            max_new_tokens: Limit of one answer.
            parse: Finds tool calls and reasoning in the model's text; None = answers are plain text.
        """
        self.engine = engine
        self._max_context, self._max_new_tokens, self._parse = engine.room, max_new_tokens, parse
        self._calls: list[Call] = []

    @property
    def max_bytes(self) -> int:
        """Largest request body that can fit into the model's context."""
        return 2**18 + 64 * self._max_context

    def place(self, asked: Asked) -> Placed:
        """Render and tokenise a call; this may take seconds, so call it away from the event loop.

        Raises:
            Refusal: The context leaves no room for an answer.
            ValueError: The model has no chat template, or its template refuses the messages or ignores the tools, or
                the tokenizer has no token for a character.
        """
        if len(asked.messages) > self._max_context:  # each has at least one token
            raise self._too_long(f"{len(asked.messages)} messages")
        placed = self._place_text(asked) if asked.prompt else self._place_chat(asked)
        if len(placed.context) >= self._max_context:
            raise self._too_long(f"{len(placed.context)} tokens before the answer")
        return placed

    async def complete(self, placed: Placed) -> list[Call]:
        """Generate the answers; pass those that the client receives to `keep`."""
        return list(await asyncio.gather(*(self._answer(placed) for _ in range(placed.asked.num))))

    async def _answer(self, placed: Placed) -> Call:
        asked = placed.asked
        limit = min(self._max_new_tokens, asked.max_tokens or self._max_new_tokens)
        turn = await self.engine.generate(placed.context, max_new_tokens=limit, stop=asked.stop)
        if self._parse is None or asked.prompt:
            answer: Message = {"role": "assistant", "content": _before(self._visible(turn), asked.stop)}
        else:
            own = turn.token_ids[:-1] if turn.stop_reason is StopReason.STOP else turn.token_ids
            text = str(self.engine.tokenizer.decode(own.tolist()))
            answer = self._parse(_before(text, asked.stop), asked.tools)
        if asked.is_single_call and "tool_calls" in answer:
            answer["tool_calls"] = answer["tool_calls"][:1]
        return Call(placed=placed, turn=turn, answer=answer)

    def _visible(self, turn: Turn) -> str:
        """Return a turn's text as the APIs show it: without special tokens, which verifiers do see."""
        return str(self.engine.tokenizer.decode(turn.token_ids.tolist(), skip_special_tokens=True))

    def _too_long(self, got: str) -> Refusal:
        # Clients such as litellm recognise the words "maximum context length".
        return Refusal(
            400,
            f"prompt is too long: this model's maximum context length is {self._max_context} tokens with the answer, "
            f"got {got}. Fix: shorten the messages, or raise model.max_context={self._max_context}",
            code="context_length_exceeded",
        )

    def keep(self, calls: Iterable[Call]) -> None:
        """Add calls to the rollout: the client has their answers."""
        self._calls += calls

    def sample(self) -> Sample:
        """Join the calls into one sample: each path from a root to a leaf is a sequence, its own or a branch's.

        The path of the last call comes first, so that a verifier sees how the rollout ended. Calls that paths share
        train in the first of them, and are part of the prompt in the others.

        Raises:
            ValueError: There is no call.
        """
        if not self._calls:
            raise ValueError("an agent must call the model at least once, got no call. Fix: call it at llm.base_url")
        last, parents = self._calls[-1], {id(call.placed.parent) for call in self._calls}
        leaves = [last, *(call for call in self._calls if id(call) not in parents and call is not last)]
        paths, seen = [], set[int]()
        for leaf in leaves:
            paths.append([call for call in _path(leaf) if id(call) not in seen])
            seen.update(map(id, paths[-1]))
        first, *branches = map(self._joined, paths)
        return replace(first, messages=tuple(_messages(paths[0], self._visible)), branches=tuple(branches))

    def credited(self, score: Score, values: Sequence[float]) -> Score:
        """Add what each call earned: where it ends, if it is on the last call's path, else to the common reward.

        Raises:
            ValueError: There is not one number for each call.
        """
        if len(values) != len(self._calls):
            raise ValueError(f"calls must be a number for each of the {len(self._calls)} answered, got {values!r:.80}")
        path = _path(self._calls[-1])
        num_prompt = len(path[0].placed.context)
        ends = {id(call): len(call.tokens) - num_prompt - 1 for call in path}
        steps, reward = list[StepReward](), score.reward or 0.0
        for call, value in zip(self._calls, values, strict=True):
            if id(call) in ends:
                steps.append(StepReward(token=ends[id(call)], value=float(value)))
            else:
                reward += float(value)
        return replace(score, reward=reward, step_rewards=tuple(steps))

    def _joined(self, calls: Sequence[Call]) -> Sample:
        turns: list[Turn] = []
        prompt = end = calls[0].placed.context
        for call in calls:
            if between := call.placed.context[len(end) :]:
                turns.append(self.engine.given(between))
            turns.append(call.turn)
            end = call.tokens
        joined = self.engine.join(turns, with_messages=False, prompt_ids=prompt)
        return replace(joined, prompt_ids=prompt)

    def _place_chat(self, asked: Asked) -> Placed:
        tokenizer = self.engine.tokenizer
        if tokenizer.chat_template is None:
            raise ValueError(
                "chat messages need a model with a chat template, got none. Fix: send text to /completions"
            )
        asked, text = _rendered(asked, tokenizer)
        if asked.tools and text == render_chat(asked.messages, tokenizer):
            raise ValueError(
                "tools must appear in the model's chat template, got a template that does not show tools. Fix: use "
                "another model, or describe the tools in a message and send none"
            )
        compared = list(map(_comparable, asked.messages))
        # The longest history first; of equal ones the latest.
        for call in sorted(self._calls[::-1], key=lambda call: -len(call.placed.asked.messages)):
            earlier = call.placed.asked
            history = [*map(_comparable, earlier.messages), _comparable(normalised(call.answer))]
            if not earlier.messages or earlier.tools != asked.tools or compared[: len(history)] != history:
                continue
            new = asked.messages[len(history) :]
            try:
                following = following_text(earlier.messages, new, tokenizer=tokenizer, tools=asked.tools)
            except ValueError:  # the template refuses results of tools without the calls that they answer
                break
            # A template may write what follows in another way, as the real answer differs from the stand-in.
            if text.endswith(following):
                end = int(call.turn.token_ids[-1]) if call.turn.stop_reason is StopReason.STOP else None
                context = (*call.tokens, *following_ids(following, tokenizer=tokenizer, end=end))
                return Placed(asked=asked, context=context, parent=call)
        return Placed(asked=asked, context=tuple(encode_text(text, tokenizer)), parent=None)

    def _place_text(self, asked: Asked) -> Placed:
        tokenizer = self.engine.tokenizer
        for call in sorted(self._calls[::-1], key=lambda call: -len(call.placed.asked.prompt)):
            earlier = call.placed.asked.prompt
            whole = earlier + self._visible(call.turn)
            # The same prompt again is a new question, even after an empty answer.
            if earlier and asked.prompt.startswith(whole) and asked.prompt != earlier:
                context = (*call.tokens, *encode_text(asked.prompt[len(whole) :], tokenizer))
                return Placed(asked=asked, context=context, parent=call)
        context = tuple(encode_text(asked.prompt, tokenizer, add_special_tokens=True))
        return Placed(asked=asked, context=context, parent=None)


def _rendered(asked: Asked, tokenizer: Tokenizer) -> tuple[Asked, str]:
    """Return a chat and its text; later system messages become the user's if the template refuses them, as Qwen3.5's.

    Raises:
        ValueError: The template refuses it all the same.
    """
    try:
        return asked, render_chat(asked.messages, tokenizer, tools=asked.tools)
    except ValueError:
        later = [{**one, "role": "user"} if one["role"] == "system" else one for one in asked.messages[1:]]
        changed = replace(asked, messages=(*asked.messages[:1], *later))
        if changed == asked:
            raise
        return changed, render_chat(changed.messages, tokenizer, tools=changed.tools)


def normalised(message: Mapping[str, Any]) -> Message:
    """Return an agent's message as `text_message` does, with tool-call arguments as an object, not JSON."""
    kept = text_message(message)
    if kept["role"] == "developer":
        kept["role"] = "system"
    if thoughts := kept.get("reasoning") or kept.get("reasoning_content"):
        # Most templates read the name that vLLM replaces.
        kept |= {"reasoning": thoughts, "reasoning_content": thoughts}
    if calls := kept.get("tool_calls"):
        kept["tool_calls"] = [{**call, "function": _with_object(call["function"])} for call in calls]
    return kept


def _with_object(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as an object; anything else that the model wrote is its only field."""
    arguments = function.get("arguments") or {}
    with suppress(ValueError):
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {**function, "arguments": arguments if isinstance(arguments, Mapping) else {"arguments": arguments}}


def _comparable(message: Message) -> object:
    """Return what identifies a message: of an assistant's only text and calls, as clients drop the rest."""
    if message["role"] != "assistant":
        return message
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message["content"].strip(), calls


def _before(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first stop string."""
    for end in stop:
        text = text.partition(end)[0]
    return text


def _path(call: Call) -> list[Call]:
    """Return the calls from the root to this one."""
    path = [call]
    while (parent := path[-1].placed.parent) is not None:
        path.append(parent)
    return path[::-1]


def _messages(path: Sequence[Call], visible: Callable[[Turn], str]) -> Iterator[dict[str, str]]:
    """Yield the messages after the first call's, with tool calls as the model wrote them."""
    before: Call | None = None
    for call in path:
        asked = call.placed.asked
        if before is not None and asked.prompt:
            earlier = before.placed.asked.prompt + visible(before.turn)
            yield {"role": ENVIRONMENT, "content": asked.prompt[len(earlier) :]}
        elif before is not None:
            for message in asked.messages[len(before.placed.asked.messages) + 1 :]:
                yield {"role": message["role"], "content": message["content"]}
        yield {"role": "assistant", "content": call.turn.text}
        before = call
