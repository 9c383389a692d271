"""The verifier worker: leases generated groups while it has room, scores several at a time, and reports the scores."""

import asyncio
import bisect
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from areal_lite.data.encode import decoder, read_tokenizer
from areal_lite.events import EventBuffer, now
from areal_lite.leases import LeaseWorker
from areal_lite.record.reward_watch import by_verifier
from areal_lite.types import Group, Lease, Sample, Score, StepReward
from areal_lite.verify.protocol import Reply
from areal_lite.verify.verifier_set import VerifierSet

if TYPE_CHECKING:
    from areal_lite.sample_queue.client import AsyncQueueClient

logger = logging.getLogger(__name__)

_LEASE_WAIT_S = 5.0

Decode = Callable[[Sequence[int]], str]


class VerifierWorker(LeaseWorker):
    """Moves groups from `generated` to `ready`."""

    def __init__(
        self, client: "AsyncQueueClient", pool: VerifierSet, *, events: EventBuffer, decode: Decode, heartbeat_s: float
    ) -> None:
        """Prepare, as a `LeaseWorker` that is called as the lane of its events.

        Args:
            pool: Started; the caller closes it.
            events: Gets one `verify` event per group whose scores the queue takes; `scored_by_workflow` has the places
                of samples that the verifier did not get.
            decode: Gives a sample's text back from its tokens; called where a verifier rewards steps, in a thread.
        """
        super().__init__(client, name=events.lane, heartbeat_s=heartbeat_s)
        self._pool, self._events, self._decode = pool, events, decode

    def _room(self) -> int:
        return self._pool.groups_at_once - len(self._held)

    async def _ask(self, limit: int) -> list[Lease]:
        leases: list[Lease] = await self._client.lease_verify(worker=self._name, limit=limit, wait_s=_LEASE_WAIT_S)
        return leases

    def _progress(self) -> int:
        return int(self._pool.gauges()["calls"])

    async def _serve(self, lease: Lease) -> None:
        start = now()
        group = lease.group
        scores = await self._watched(group, await self._scores(group))
        send = partial(self._client.complete_verify, lease_id=lease.lease_id, scores=scores)
        if not await self._deliver(lease, send):
            return  # the group has the scores of another worker
        found: dict[str, Any] = {"rewards": [score.total for score in scores]}
        if own := [place for place, sample in enumerate(group.samples) if sample.total_reward is not None]:
            found["scored_by_workflow"] = own
        if watched := by_verifier({str(place): score.metrics for place, score in enumerate(scores)}):
            found["watched"] = watched
        self._events.emit("verify", group_id=group.group_id, start=start, end=now(), **found)

    async def _scores(self, group: Group) -> list[Score]:
        # Lost samples have a score, and those that an agent has scored.
        samples = [sample for sample in group.samples if sample.score is None]
        replies = await self._pool.score(
            group.prompt, [sample.text for sample in samples], messages=[sample.messages for sample in samples]
        )

        def scores() -> list[Score]:
            found = iter([score_of(*pair, self._decode) for pair in zip(replies, samples, strict=True)])
            return [sample.score or next(found) for sample in group.samples]

        # The first step loads a tokenizer: heartbeats and deadlines must not wait for that.
        has_steps = any(reply.step_rewards for reply in replies)
        return await asyncio.to_thread(scores) if has_steps else scores()

    async def _watched(self, group: Group, scores: list[Score]) -> list[Score]:
        """Add the rewards of `reward_watch` to the metrics of a watched group's scores, for people alone."""
        if not self._pool.is_watched(group.group_id):
            return scores
        known = [place for place, score in enumerate(scores) if score.total is not None]
        rewards = await self._pool.watch(group.prompt, [group.samples[place] for place in known])
        for place, found in zip(known, rewards, strict=True):
            scores[place] = replace(scores[place], metrics={**scores[place].metrics, **found})
        return scores


def score_of(reply: Reply, sample: Sample, decode: Decode) -> Score:
    """Turn a verifier's reply about `sample.text` into a score: step rewards move from characters to tokens.

    `decode` is called only where there are step rewards.
    """
    if reply.failure is not None:
        return Score(failure=reply.failure)
    token_ids = sample.token_ids.tolist() if reply.step_rewards else []
    return Score(
        reward=reply.reward,
        step_rewards=tuple(
            StepReward(token=token_of(end, token_ids, decode), value=value) for end, value in reply.step_rewards
        ),
        parts=dict(reply.parts),
        metrics=dict(reply.metrics),
        feedback=reply.feedback,
    )


def token_of(end_character: int, token_ids: Sequence[int], decode: Decode) -> int:
    """Return the first token, 0..T-1, with which the text's first `end_character` characters, from 1, are there.

    A prefix counts once it decodes to these characters as the whole does: a character whose bytes are spread over
    several tokens is complete with the last of them. Special tokens that are left out of the text add nothing, so no
    step ends at one after it.

    Args:
        token_ids: [T] of the whole completion.
        decode: Turns token ids into text; prefixes of ids must yield prefixes of text, but for a broken last character.

    Example:
        >>> token_of(3, [72, 101, 121, 33], lambda ids: "".join(map(chr, ids)))
        2
    """
    wanted = decode(token_ids)[:end_character]
    prefixes = range(1, len(token_ids))
    return bisect.bisect_left(prefixes, True, key=lambda n: decode(token_ids[:n])[:end_character] == wanted)


def decoder_of(model_folder: str, *, skip_special_tokens: bool) -> Decode:
    """Return a function that decodes as samples are decoded; it loads the tokenizer when it is first called."""
    options = {"skip_special_tokens": skip_special_tokens}
    text_of = cache(lambda: decoder(read_tokenizer(model_folder), model_folder, **options))
    return lambda token_ids: text_of()(token_ids)
