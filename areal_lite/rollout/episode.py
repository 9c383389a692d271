"""One sample as an episode: what a workflow sees of the engine, and how its turns become a sample.

A workflow (`workflows.py`, or a user's own) calls `EpisodeEngine.generate` once a turn and returns its turns;
`runner.py` joins them. Token in, token out: a turn is generated behind exactly the tokens that the sample holds before
it, so that its log-probabilities are those of the sample.
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
class Given:
    """A turn that no model produced, an environment's or a workflow's own: context, which never trains."""

    token_ids: Int32
    """[T] tokens of the turn; a chat template's own around it included."""
    text: str
    """Its words, special tokens left out."""
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


Turn = Sample | Given
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
        """Prepare one episode.

        Args:
            sampling: Temperature, and the tokens that the whole sample may have.
            seed_of: From the number of a `generate` call to its seed; None where nothing is random.
            is_chat: Whether the prompt went through the model's chat template.
            turn_timeout_s: Seconds the environment may take for one reply.
        """
        self.prompt_ids = prompt_ids
        """Tokens of the prompt: the context of the first turn."""
        self.room = sampling.max_new_tokens
        """Tokens the sample may still take, behind what `generate` last returned."""
        self.failure: Exception | None = None
        """What the engine itself raised, if anything: a workflow may not hide its death."""
        self._engine, self._sampling, self._seed_of, self._is_chat = engine, sampling, seed_of, is_chat
        self._turn_timeout_s = turn_timeout_s
        self.clock = asyncio.timeout(turn_timeout_s)
        """To be entered at once: ends the episode; it runs while that waits for neither the engine nor `in_time`."""
        self._made: list[tuple[Sample, tuple[int, ...]]] = []
        self._calls = 0
        self._waits = 0

    @property
    def seed(self) -> int | None:
        """Seed of the sample, for a workflow that draws something itself; None where nothing is random."""
        return None if self._seed_of is None else self._seed_of(0)

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        ignore_end: bool = False,
    ) -> Sample:
        """Have the model produce its next turn. A weight update in between is the engine's business.

        Args:
            token_ids: The whole context so far: the prompt's, and those of all turns that the episode will return.
            max_new_tokens: Of this turn at most; None = all the room there is.
            stop: The turn also ends behind this text, or any of these: with the token that completes it.
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
        sampling = replace(
            self._sampling,
            seed=None if self._seed_of is None else self._seed_of(self._calls),
            max_new_tokens=room if max_new_tokens is None else min(room, max_new_tokens),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            ignore_end=ignore_end,
        )
        self._calls += 1
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

    @property
    def temperature(self) -> float:
        """Of the policy that is sampled from; 0 = greedy."""
        return self._sampling.temperature

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._engine.tokenizer

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, as `areal_lite.data.encode.decoder` gives it."""
        return self._engine.text_of(token_ids)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, none added."""
        return encode_text(text, self._engine.tokenizer)

    def given(self, text_or_ids: str | Sequence[int]) -> Given:
        """Return a turn that is not the model's, of exactly this text or these token ids."""
        if isinstance(text_or_ids, str):
            text, token_ids = text_or_ids, self.encode(text_or_ids)
        else:
            text, token_ids = self.text_of(text_or_ids), list(text_or_ids)
        return Given(token_ids=_frozen(token_ids), text=text)

    def reply(self, messages_before: Sequence[Mapping[str, str]], reply: str | Sequence[str]) -> Given:
        """Return the environment's answer to the model's last turn: in the chat template if the prompt is in one.

        Args:
            messages_before: `messages_of` the turns so far, the model's last.
            reply: A text, or the results of tools, for which templates may have a role of their own.

        Raises:
            ValueError: The last message is not the model's, or the reply cannot be encoded.
        """
        last = messages_before[-1]["content"] if messages_before else None
        answer = next((turn for turn, _ in reversed(self._made) if turn.text == last), None)
        if answer is None:
            raise ValueError(f"a reply answers what the model said last, got {last!r:.60}, which it did not say")
        end = int(answer.token_ids[-1]) if answer.stop_reason is StopReason.STOP else None
        text = reply if isinstance(reply, str) else "\n".join(reply)
        token_ids = (
            reply_ids(messages_before, reply, tokenizer=self._engine.tokenizer, end=end)
            if self._is_chat
            else self.encode(text)
        )
        return Given(token_ids=_frozen(token_ids), text=text)

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

    def join(self, turns: object, *, with_messages: bool, behind: tuple[int, ...] | None = None) -> Sample:
        """Check what a workflow returned, and join it into one sample with one list of version spans.

        Given turns at the end are cut off, as nothing trains behind the model's last token. The sample counts as cut
        off (`LENGTH`) where its last turn was, and where such a given turn left the model no room to answer.

        Args:
            turns: In order, at least one of the model's.
            with_messages: Whether the sample names its turns.
            behind: What the first of them stands behind; None = the prompt.

        Raises:
            TypeError: It returned something else than turns.
            ValueError: There is no turn of the model's, or one is not as `generate` returned it, or was generated
                behind other tokens.
        """
        if not isinstance(turns, list | tuple) or not all(isinstance(turn, Turn) for turn in turns):
            raise TypeError(f"a workflow must return a list of turns, got {turns!r:.80}")
        context = behind = self.prompt_ids if behind is None else behind
        for number, turn in enumerate(turns):
            if isinstance(turn, Sample):
                self._check_origin(turn, context, number=number)
            context += tuple(turn.token_ids.tolist())
        own = [(end, turn) for end, turn in enumerate(turns, start=1) if isinstance(turn, Sample)]
        if not own:
            raise ValueError(f"an episode must have a turn of the model's, got {len(turns)} turns, none of them")
        num_kept, last = own[-1]
        if len(turns) == 1 and not with_messages:
            return last
        kept, limit = turns[:num_kept], self._sampling.max_new_tokens
        token_ids = np.concatenate([turn.token_ids for turn in kept])
        is_cut_off = num_kept < len(turns) and len(context) - len(self.prompt_ids) >= limit
        return Sample(
            token_ids=token_ids,
            logprobs=np.concatenate([turn.logprobs for turn in kept]),
            spans=_joined_spans(kept),
            stop_reason=StopReason.LENGTH if is_cut_off else last.stop_reason,
            text=last.text if num_kept == 1 else self.text_of(token_ids.tolist()),
            messages=tuple(messages_of(kept)) if with_messages else (),
            routes=_joined_routes(kept, start=len(behind)),
        )

    def _check_origin(self, turn: Sample, context: tuple[int, ...], *, number: int) -> None:
        made = next((context for own, context in self._made if own is turn), None)
        if made is None:
            raise ValueError(
                f"a turn of the model's must be one that engine.generate returned, as it was; turn {number}, "
                f"{turn.text!r:.60}, is none: use engine.given for tokens of your own"
            )
        if made != context:
            raise ValueError(
                f"turn {number}, {turn.text!r:.60}, was generated behind {len(made)} tokens, but the episode has "
                f"{len(context)}, or other ones, before it: its log-probabilities would be wrong; return every turn "
                "that was in its context, in order"
            )

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Stop the clock while something with a deadline of its own is awaited."""
        self._waits += 1
        self.clock.reschedule(None)
        try:
            yield
        finally:
            self._waits -= 1
            if self._waits == 0 and not self.clock.expired():
                self.clock.reschedule(asyncio.get_running_loop().time() + self._turn_timeout_s)


def _joined_spans(turns: Sequence[Turn]) -> tuple[VersionSpan, ...]:
    """Shift every turn's spans behind those before it; neighbours of one version become one span."""
    joined: list[VersionSpan] = []
    start = 0
    for turn in turns:
        for span in turn.spans:
            first = start + span.start
            if joined and joined[-1].version == span.version:
                first = joined.pop().start
            joined.append(VersionSpan(version=span.version, start=first, end=start + span.end))
        start += len(turn.token_ids)
    return tuple(joined)


def _joined_routes(turns: Sequence[Turn], *, start: int) -> npt.NDArray[Any] | None:
    """Return the experts of each token as the first turn that has it had them; None where a turn has none.

    Args:
        start: Tokens before the first turn.
    """
    joined: list[npt.NDArray[Any]] = []
    known, end = 0, start
    for turn in turns:
        end += len(turn.token_ids)
        if isinstance(turn, Sample):
            if turn.routes is None:
                return None
            # Where some in between are missing, only those behind are known.
            is_whole = len(turn.routes) >= end - known
            joined = [*joined, turn.routes[known - end :]] if is_whole else [turn.routes]
            known = end
    whole: npt.NDArray[Any] = np.concatenate(joined)
    return whole


def _frozen(token_ids: Sequence[int]) -> Int32:
    array = np.array(token_ids, dtype=np.int32)
    array.setflags(write=False)
    return array
