"""One sample as an episode: what a workflow sees of the engine, and how its segments become a sample.

A workflow (`workflows.py`, or a user's own) calls `EpisodeEngine.generate` once a turn and returns its segments;
`runner.py` joins them. Token in, token out: a turn is generated behind exactly the tokens that the sample holds before
it, so that its log-probabilities are those of the sample.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from areal_lite.rollout.dialogue import ASSISTANT, ENVIRONMENT, Dialogue
from areal_lite.rollout.engine import GenerationEngine, Sampling
from areal_lite.types import GIVEN, Float32, Int32, Sample, StopReason, VersionSpan

__all__ = ["EpisodeEngine", "Segment", "join", "messages_of"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """One turn of an episode: what the model produced in one call, or what it was given.

    Example, an environment's turn: `Segment(token_ids=np.array([7], dtype=np.int32), text="<")`
    """

    token_ids: Int32
    """[T] tokens of the turn; a chat template's own around it included."""
    text: str
    """Its words, special tokens left out."""
    logprobs: Float32 | None = None
    """[T] log-probability of each token under the behaviour policy in nats; None where given."""
    spans: tuple[VersionSpan, ...] = ()
    """Which version produced which of its tokens; empty where given."""
    stop_reason: StopReason | None = None
    """Why the model stopped; None where given."""

    @property
    def is_given(self) -> bool:
        """Whether no model produced it: such tokens are context, and never train."""
        return not self.spans

    @property
    def role(self) -> str:
        """Who speaks: `assistant`, or `environment`."""
        return ENVIRONMENT if self.is_given else ASSISTANT


def messages_of(segments: Sequence[Segment]) -> list[dict[str, str]]:
    """Return turns as messages, for an environment or a verifier."""
    return [{"role": segment.role, "content": segment.text} for segment in segments]


class EpisodeEngine:
    """What a workflow sees of a generation engine: one sample's prompt, room and seeds."""

    def __init__(
        self,
        engine: GenerationEngine,
        prompt_ids: tuple[int, ...],
        *,
        sampling: Sampling,
        seed_of: Callable[[int], int] | None,
        is_chat: bool = False,
        turn_timeout_s: float,
        clock: asyncio.Timeout,
    ) -> None:
        """Prepare one episode.

        Args:
            engine: Generates.
            prompt_ids: Tokens of the prompt.
            sampling: Temperature, and the tokens that the whole sample may have.
            seed_of: From the number of a `generate` call to its seed; None where nothing is random.
            is_chat: Whether the prompt went through the model's chat template.
            turn_timeout_s: Seconds the environment may take for one reply.
            clock: Ends the episode; it runs while the workflow waits for neither the engine nor `in_time`.
        """
        self.prompt_ids = prompt_ids
        """Tokens of the prompt: the context of the first turn."""
        self.room = sampling.max_new_tokens
        """Tokens the sample may still take, behind what `generate` last returned."""
        self.failure: Exception | None = None
        """What the engine itself raised, if anything: a workflow may not hide its death."""
        self._engine, self._sampling, self._seed_of, self._is_chat = engine, sampling, seed_of, is_chat
        self._turn_timeout_s, self._clock = turn_timeout_s, clock
        self._made: list[tuple[Segment, tuple[int, ...]]] = []
        self._calls = 0
        self._waits = 0
        self._start_clock()

    @property
    def seed(self) -> int | None:
        """Seed of the sample, for a workflow that draws something itself; None where nothing is random."""
        return None if self._seed_of is None else self._seed_of(0)

    async def generate(
        self, token_ids: Sequence[int], *, max_new_tokens: int | None = None, ignore_end: bool = False
    ) -> Segment:
        """Have the model produce its next turn. A weight update in between is the engine's business.

        Args:
            token_ids: The whole context so far: the prompt's, and those of all turns that the episode will return.
            max_new_tokens: Of this turn at most; None = all the room there is.
            ignore_end: Go on behind an end-of-sequence token, up to that number; for benchmarks.

        Raises:
            ValueError: The context does not begin with the prompt, or leaves no room.
        """
        context = tuple(token_ids)
        if context[: len(self.prompt_ids)] != self.prompt_ids:
            raise ValueError(
                f"engine.generate takes the whole context, from engine.prompt_ids on, {self.prompt_ids!r:.60}; got "
                f"{context!r:.60}"
            )
        room = self._sampling.max_new_tokens - (len(context) - len(self.prompt_ids))
        if room < 1 or (max_new_tokens is not None and max_new_tokens < 1):
            raise ValueError(
                f"a turn needs room for a token, got room for {room} of {self._sampling.max_new_tokens} and "
                f"max_new_tokens={max_new_tokens}: end the episode where engine.room is too small, or raise "
                "rollout.max_new_tokens"
            )
        limit = room if max_new_tokens is None else min(room, max_new_tokens)
        sample = await self._request(context, limit, ignore_end=ignore_end)
        segment = Segment(
            token_ids=_frozen(sample.token_ids),
            logprobs=_frozen(sample.logprobs),
            spans=sample.spans,
            text=sample.text,
            stop_reason=sample.stop_reason,
        )
        self._made.append((segment, context))
        self.room = room - sample.num_tokens
        return segment

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, none added."""
        return self._words().encode(text)

    def given(self, text_or_ids: str | Sequence[int]) -> Segment:
        """Return a turn that is not the model's, of exactly this text or these token ids."""
        if isinstance(text_or_ids, str):
            text, token_ids = text_or_ids, self.encode(text_or_ids)
        else:
            text, token_ids = self._words().decode(text_or_ids), list(text_or_ids)
        return Segment(token_ids=_frozen(np.array(token_ids, dtype=np.int32)), text=text)

    def reply(self, messages_before: Sequence[Mapping[str, str]], reply_text: str) -> Segment:
        """Return the environment's answer to the model's last turn: in the chat template if the prompt is in one.

        Args:
            messages_before: `messages_of` the turns so far, the model's last.
            reply_text: The environment's words.

        Raises:
            ValueError: The last message is not the model's, or the reply cannot be encoded.
        """
        last = messages_before[-1]["content"] if messages_before else None
        answer = next((segment for segment, _ in reversed(self._made) if segment.text == last), None)
        if answer is None:
            raise ValueError(f"a reply answers what the model said last, got {last!r:.60}, which it did not say")
        end = int(answer.token_ids[-1]) if answer.stop_reason is StopReason.STOP else None
        token_ids = self._words().reply_ids(messages_before, reply_text, end=end)
        return Segment(token_ids=_frozen(np.array(token_ids, dtype=np.int32)), text=reply_text)

    async def in_time(self, work: Awaitable[T]) -> T:
        """Await something of the environment's, `rollout.turn_timeout_s` at most.

        Raises:
            TimeoutError: It took longer, and was cancelled.
        """
        with self._waiting():
            try:
                async with asyncio.timeout(self._turn_timeout_s) as own:
                    return await work
            except TimeoutError as error:
                if not own.expired():
                    raise
                raise TimeoutError(
                    f"the environment may take rollout.turn_timeout_s={self._turn_timeout_s:g} s, it took longer"
                ) from error

    def join(self, segments: object, *, with_messages: bool) -> Sample:
        """Check what a workflow returned, and join it into one sample (see `join`).

        Raises:
            TypeError: It returned something else than segments.
            ValueError: A segment is not as `generate` returned it, or was generated behind other tokens.
        """
        if not isinstance(segments, list | tuple) or not all(isinstance(item, Segment) for item in segments):
            raise TypeError(f"a workflow must return a list of segments, got {segments!r:.80}")
        context = self.prompt_ids
        for number, segment in enumerate(segments):
            if not segment.is_given:
                self._check_origin(segment, context, number=number)
            context += tuple(segment.token_ids.tolist())
        return join(
            segments,
            decode=lambda token_ids: self._words().decode(token_ids),
            max_new_tokens=self._sampling.max_new_tokens,
            with_messages=with_messages,
        )

    def _check_origin(self, segment: Segment, context: tuple[int, ...], *, number: int) -> None:
        made = next((context for own, context in self._made if own is segment), None)
        if made is None:
            raise ValueError(
                f"a segment of the model's must be one that engine.generate returned, as it was; segment {number}, "
                f"{segment.text!r:.60}, is none: use engine.given for tokens of your own"
            )
        if made != context:
            raise ValueError(
                f"segment {number}, {segment.text!r:.60}, was generated behind {len(made)} tokens, but the episode has "
                f"{len(context)}, or other ones, before it: its log-probabilities would be wrong; return every segment "
                "that was in its context, in order"
            )

    async def _request(self, context: tuple[int, ...], limit: int, *, ignore_end: bool) -> Sample:
        seed = None if self._seed_of is None else self._seed_of(self._calls)
        self._calls += 1
        with self._waiting():
            try:
                sampling = replace(self._sampling, max_new_tokens=limit, seed=seed, ignore_end=ignore_end)
                return await self._engine.generate(context, sampling)
            except Exception as error:
                self.failure = error
                raise

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Stop the clock while something with a deadline of its own is awaited."""
        self._waits += 1
        self._clock.reschedule(None)
        try:
            yield
        finally:
            self._waits -= 1
            if self._waits == 0 and not self._clock.expired():
                self._start_clock()

    def _start_clock(self) -> None:
        self._clock.reschedule(asyncio.get_running_loop().time() + self._turn_timeout_s)

    def _words(self) -> Dialogue:
        return Dialogue(self._engine.tokenizer, chat=self._is_chat)


def join(
    segments: Sequence[Segment],
    *,
    decode: Callable[[list[int]], str],
    max_new_tokens: int,
    with_messages: bool = True,
) -> Sample:
    """Join the turns of an episode into one sample with one list of version spans.

    Given turns at the end are cut off, as nothing trains behind the model's last token. The sample counts as cut off
    (`LENGTH`) where its last turn was, and where such a given turn left the model no room to answer.

    Args:
        segments: In order, at least one of the model's.
        decode: From token ids to text, special tokens left out.
        max_new_tokens: Tokens that the sample may have.
        with_messages: Whether the sample names its turns.

    Raises:
        ValueError: There is no turn of the model's, or the sample is too long.
    """
    kept = list(segments)
    while kept and kept[-1].is_given:
        kept.pop()
    if not kept:
        raise ValueError(f"an episode must have a segment of the model's, got {len(segments)} segments, none of them")
    token_ids = np.concatenate([segment.token_ids for segment in kept])
    if len(token_ids) > max_new_tokens:
        raise ValueError(
            f"an episode may have rollout.max_new_tokens={max_new_tokens} tokens, got {len(token_ids)} in {len(kept)} "
            "segments: end it where engine.room is too small"
        )
    stop_reason = kept[-1].stop_reason
    assert stop_reason is not None  # the last is the model's
    if len(segments) > len(kept) and sum(len(segment.token_ids) for segment in segments) >= max_new_tokens:
        stop_reason = StopReason.LENGTH
    return Sample(
        token_ids=token_ids,
        logprobs=np.concatenate([_logprobs(segment) for segment in kept]),
        spans=_joined_spans(kept),
        stop_reason=stop_reason,
        text=kept[0].text if len(kept) == 1 else decode(token_ids.tolist()),
        messages=tuple(messages_of(kept)) if with_messages else (),
    )


def _logprobs(segment: Segment) -> Float32:
    return np.zeros(len(segment.token_ids), dtype=np.float32) if segment.logprobs is None else segment.logprobs


def _joined_spans(segments: Sequence[Segment]) -> tuple[VersionSpan, ...]:
    """Shift every segment's spans behind those before it; neighbours of one version become one span."""
    joined: list[VersionSpan] = []
    start = 0
    for segment in segments:
        size = len(segment.token_ids)
        given = [VersionSpan(version=GIVEN, start=0, end=size)] if segment.is_given and size else []
        for span in segment.spans or given:
            first = start + span.start
            if joined and joined[-1].version == span.version:
                first = joined.pop().start
            joined.append(VersionSpan(version=span.version, start=first, end=start + span.end))
        start += size
    return tuple(joined)


def _frozen(array: Any) -> Any:
    array.setflags(write=False)
    return array
