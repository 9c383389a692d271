"""One sample as an episode: what a workflow sees of the engine, and how its turns become a sample.

A workflow (`workflows.py`, or a user's own) calls `EpisodeEngine.generate` once per turn and returns its turns, which
`runner.py` joins. Tokens in, tokens out: a turn is generated after exactly the tokens that the sample holds before it,
so its log-probabilities are those of the sample.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from areal_lite.data.encode import encode_text
from areal_lite.rollout.dialogue import ENVIRONMENT, reply_ids
from areal_lite.rollout.engine import Sampling
from areal_lite.types import GIVEN, Float32, Int32, Sample, StopReason, VersionSpan

if TYPE_CHECKING:
    from areal_lite.rollout.vllm_engine import VllmEngine

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observation:
    """A turn that the model did not produce, but an environment or a workflow: context, which never trains."""

    token_ids: Int32
    """[T] tokens of the turn, those that a chat template puts around it included."""
    text: str
    role: ClassVar[str] = ENVIRONMENT
    is_given: ClassVar[bool] = True
    stop_reason: ClassVar[None] = None

    @property
    def logprobs(self) -> Float32:
        """[T] zeros."""
        return np.zeros(len(self.token_ids), dtype=np.float32)

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        """One span over all tokens, if there are any."""
        return (VersionSpan(version=GIVEN, start=0, end=len(self.token_ids)),) if len(self.token_ids) else ()


Turn = Sample | Observation
"""One turn of an episode: what the model produced in one call, or what it was given."""


def messages_of(turns: Sequence[Turn]) -> list[dict[str, str]]:
    """Return turns as messages, for an environment or a verifier."""
    return [{"role": turn.role, "content": turn.text} for turn in turns]


class EpisodeEngine:
    """What a workflow sees of a generation engine: one sample's prompt, room and seeds."""

    def __init__(
        self,
        engine: "VllmEngine",
        prompt_ids: tuple[int, ...],
        *,
        sampling: Sampling,
        seed_of: Callable[[int], int] | None,
        is_chat: bool = False,
        turn_timeout_s: float,
    ) -> None:
        """Prepare one episode; the caller enters `clock`.

        Args:
            sampling: Temperature, and the number of tokens that the whole sample may have.
            seed_of: From the number of a `generate` call to its seed; None if nothing is random.
            is_chat: Whether the prompt was made with the model's chat template.
            turn_timeout_s: Seconds that the environment may take for one reply.
        """
        self.prompt_ids = prompt_ids
        """Tokens of the prompt: the context of the first turn."""
        self.room = sampling.max_new_tokens
        """Tokens the sample may still take after the last turn of the model."""
        self.failure: Exception | None = None
        """What the engine itself raised: a workflow must not hide that it died."""
        self.clock = asyncio.timeout(turn_timeout_s)
        """Ends the episode; it only runs while the episode waits for neither the engine nor `in_time`."""
        self._engine, self._sampling, self._seed_of, self._is_chat = engine, sampling, seed_of, is_chat
        self._turn_timeout_s = turn_timeout_s
        self._made: list[tuple[Sample, tuple[int, ...]]] = []
        """The model's turns with their contexts."""
        self._num_calls = 0
        self._num_waiting = 0

    @property
    def seed(self) -> int | None:
        """Seed of the sample, for a workflow that draws something itself; None if nothing is random."""
        return None if self._seed_of is None else self._seed_of(0)

    @property
    def temperature(self) -> float:
        """Of the policy that is sampled; 0 = greedy."""
        return self._sampling.temperature

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._engine.tokenizer

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        ignore_end: bool = False,
    ) -> Sample:
        """Have the model produce its next turn; the weights may change while it does.

        Args:
            token_ids: The whole context so far: the prompt, and all turns that the episode will return.
            max_new_tokens: Limit of this turn; None = all the room that is left.
            stop: The turn also ends after this text, or any of these, with the token that completes it.
            ignore_end: Continue after an end-of-sequence token, up to the limit; for benchmarks.

        Raises:
            ValueError: The context does not start with the prompt, or leaves no room.
        """
        context = tuple(np.asarray(token_ids).tolist())  # integers of numpy do not travel to an engine's process
        if context[: len(self.prompt_ids)] != self.prompt_ids:
            raise ValueError(
                f"engine.generate takes the whole context, starting with engine.prompt_ids, {self.prompt_ids!r:.60}; "
                f"got {context!r:.60}"
            )
        room = self._sampling.max_new_tokens - (len(context) - len(self.prompt_ids))
        if room < 1 or (max_new_tokens is not None and max_new_tokens < 1):
            raise ValueError(
                f"a turn needs room for a token, got room for {room} of {self._sampling.max_new_tokens} and "
                f"max_new_tokens={max_new_tokens}. Fix: end the episode when engine.room is too small, or raise "
                "rollout.max_new_tokens"
            )
        sampling = replace(
            self._sampling,
            seed=None if self._seed_of is None else self._seed_of(self._num_calls),
            max_new_tokens=room if max_new_tokens is None else min(room, max_new_tokens),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            ignore_end=ignore_end,
        )
        self._num_calls += 1
        with self._waiting():
            try:
                turn = await self._engine.generate(context, sampling)
            except Exception as error:
                self.failure = error
                raise
        for array in (turn.token_ids, turn.logprobs):
            array.setflags(write=False)
        self._made.append((turn, context))
        self.room = room - turn.num_tokens
        return turn

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, as `areal_lite.data.encode.decoder` gives it."""
        return self._engine.text_of(token_ids)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""
        return encode_text(text, self._engine.tokenizer)

    def given(self, text_or_ids: str | Sequence[int]) -> Observation:
        """Return a turn that is not the model's, of exactly this text or these token ids."""
        if isinstance(text_or_ids, str):
            return _observation(self.encode(text_or_ids), text_or_ids)
        return _observation(text_or_ids, self.text_of(text_or_ids))

    def reply(self, messages_before: Sequence[Mapping[str, str]], reply: str | Sequence[str]) -> Observation:
        """Return the environment's answer to the model's last turn, in the chat template if the prompt is.

        Args:
            messages_before: `messages_of` the turns so far, the model's last.
            reply: A text, or results of tools, for which templates may have a role of their own.

        Raises:
            ValueError: The last message is not the model's, or the reply cannot be encoded.
        """
        last = messages_before[-1]["content"] if messages_before else None
        answer = next((turn for turn, _ in reversed(self._made) if turn.text == last), None)
        if answer is None:
            raise ValueError(f"a reply must follow a message that the model produced, got {last!r:.60}")
        text = reply if isinstance(reply, str) else "\n".join(reply)
        if not self._is_chat:
            return _observation(self.encode(text), text)
        end = int(answer.token_ids[-1]) if answer.stop_reason is StopReason.STOP else None
        return _observation(reply_ids(messages_before, reply, tokenizer=self._engine.tokenizer, end=end), text)

    async def in_time(self, work: Awaitable[T]) -> T:
        """Await something of the environment's, for at most `rollout.turn_timeout_s`.

        Raises:
            TimeoutError: It took longer, and was cancelled.
        """
        with self._waiting():
            try:
                async with asyncio.timeout(self._turn_timeout_s):
                    return await work
            except TimeoutError as error:
                limit = f"rollout.turn_timeout_s={self._turn_timeout_s:g} s"
                raise TimeoutError(f"the environment may take {limit}, it took longer") from error

    def join(self, turns: object, *, with_messages: bool, prompt_ids: tuple[int, ...] | None = None) -> Sample:
        """Check what a workflow returned, and join it into one sample with one list of version spans.

        Observations at the end are dropped, as nothing trains after the model's last token. The sample counts as cut
        off (`LENGTH`) if its last turn was, or if such an observation left no room for an answer.

        Args:
            turns: In order, at least one of the model's.
            with_messages: Whether the sample names its turns.
            prompt_ids: What the first turn follows; None = the episode's prompt.

        Raises:
            TypeError: These are not turns.
            ValueError: No turn is the model's, or one is not as `generate` returned it for the tokens before it.
        """
        if not isinstance(turns, list | tuple) or not all(isinstance(turn, Turn) for turn in turns):
            raise TypeError(f"a workflow must return a list of turns, got {turns!r:.80}")
        context = prompt_ids = self.prompt_ids if prompt_ids is None else prompt_ids
        last, num_kept = None, 0
        for number, turn in enumerate(turns):
            if isinstance(turn, Sample):
                self._check_origin(turn, context, number=number)
                last, num_kept = turn, number + 1
            context += tuple(turn.token_ids.tolist())
        if last is None:
            raise ValueError(f"an episode must have a turn of the model's, got {len(turns)} turns, none of them")
        if len(turns) == 1 and not with_messages:
            return last
        kept = turns[:num_kept]
        token_ids = np.concatenate([turn.token_ids for turn in kept])
        is_full = len(context) - len(self.prompt_ids) >= self._sampling.max_new_tokens
        return Sample(
            token_ids=token_ids,
            logprobs=np.concatenate([turn.logprobs for turn in kept]),
            spans=_joined_spans(kept),
            stop_reason=StopReason.LENGTH if num_kept < len(turns) and is_full else last.stop_reason,
            text=last.text if num_kept == 1 else self.text_of(token_ids.tolist()),
            messages=tuple(messages_of(kept)) if with_messages else (),
            routes=_joined_routes(kept, start=len(prompt_ids)),
        )

    def _check_origin(self, turn: Sample, context: tuple[int, ...], *, number: int) -> None:
        made = next((context for own, context in self._made if own is turn), None)
        if made != context:
            found = "a turn that it did not return" if made is None else f"one generated after {len(made)} tokens"
            raise ValueError(
                f"turn {number}, {turn.text!r:.60}, must be as engine.generate returned it for the {len(context)} "
                f"tokens before it, got {found}. Fix: return all turns of the context, others by engine.given(...)"
            )

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Stop the clock while something with a deadline of its own is awaited."""
        self._num_waiting += 1
        self.clock.reschedule(None)
        try:
            yield
        finally:
            self._num_waiting -= 1
            if self._num_waiting == 0 and not self.clock.expired():
                self.clock.reschedule(asyncio.get_running_loop().time() + self._turn_timeout_s)


def _joined_spans(turns: Sequence[Turn]) -> tuple[VersionSpan, ...]:
    """Shift each turn's spans by the tokens before it, and merge neighbours of one version."""
    joined: list[VersionSpan] = []
    offset = 0
    for turn in turns:
        for span in turn.spans:
            start = offset + span.start
            if joined and joined[-1].version == span.version:
                start = joined.pop().start
            joined.append(VersionSpan(version=span.version, start=start, end=offset + span.end))
        offset += len(turn.token_ids)
    return tuple(joined)


def _joined_routes(turns: Sequence[Turn], *, start: int) -> npt.NDArray[Any] | None:
    """Return the experts of each token as chosen in the first turn that has it; None if a turn has none.

    Each turn has the experts of the last tokens before its end, at best of all of them:

        tokens   p p p p a b $ > > c d $        turn 1 has those up to b, turn 2 up to d
        routes   1 1 1 1 1 1 2 2 2 2 2          the last token has none

    Args:
        start: Tokens before the first turn.
    """
    joined: list[npt.NDArray[Any]] = []
    num_known, end = 0, start
    for turn in turns:
        end += len(turn.token_ids)
        if isinstance(turn, Sample):
            if turn.routes is None:
                return None
            if len(turn.routes) < end - num_known:  # a gap: only what follows it is of use
                joined = [turn.routes]
            else:
                joined.append(turn.routes[num_known - end :])
            num_known = end
    routes: npt.NDArray[Any] = np.concatenate(joined)
    return routes


def _observation(token_ids: Sequence[int], text: str) -> Observation:
    array = np.array(token_ids, dtype=np.int32)
    array.setflags(write=False)
    return Observation(token_ids=array, text=text)
