"""The batch that is being trained: joined with its prompts and dealt to updates and ranks, once.

A rank that fetches again gets the same rows.
"""

import random
import zlib
from collections.abc import Iterable, Sequence

import numpy as np

from areal_lite.errors import LedgerError
from areal_lite.sample_queue.ledger import Batch
from areal_lite.sample_queue.records import Rewards
from areal_lite.types import Group, Prompt, Row, Shard, means


class ShardedBatch:
    """A taken batch whose rows have their minibatches and ranks.

    Rows are ordered by group, sample and branch; the branches of a sample are in its minibatch and on its rank.
    """

    def __init__(
        self, batch: Batch, prompts: Sequence[Prompt], *, num_minibatches: int, num_ranks: int, run_seed: int
    ) -> None:
        """Deal the rows.

        Args:
            batch: As the ledger returned it.
            prompts: One per group.
            num_minibatches: Optimiser updates of the step.
            num_ranks: Trainer ranks.
            run_seed: Orders the rows, together with the batch's version.
        """
        self.batch = batch
        self._prompts, self._num_ranks = prompts, num_ranks
        samples = [
            (group_index, sample_index, sample)
            for group_index, group in enumerate(batch.groups)
            for sample_index, sample in enumerate(group.samples)
        ]
        lengths = []
        for group_index, _, sample in samples:
            shared = prompts[group_index].token_ids
            lengths.append(sum(len(one.prompt_ids or shared) + one.num_tokens for one in sample.sequences))
        minibatches, ranks = assign_rows(
            lengths,
            num_minibatches=num_minibatches,
            num_ranks=num_ranks,
            seed=zlib.crc32(f"{run_seed}/{batch.version}".encode()),
        )
        self._rows: list[tuple[int, Row]] = []
        for (group_index, sample_index, sample), minibatch, rank in zip(samples, minibatches, ranks, strict=True):
            for sequence in sample.sequences:
                row = Row(
                    group_index=group_index,
                    sample_index=sample_index,
                    is_branch=sequence is not sample,
                    minibatch=minibatch,
                    prompt_token_ids=sequence.prompt_ids or prompts[group_index].token_ids,
                    max_new_tokens=prompts[group_index].row.get("max_new_tokens"),
                    sample=sequence,
                )
                self._rows.append((rank, row))

    def rewards(self) -> Rewards:
        """Return means of its rewards."""
        scored = [
            (group.prompt_id.partition("/")[0], total, sample.score)
            for group in self.batch.groups
            for sample in group.samples
            if sample.score is not None and (total := sample.score.total) is not None
        ]
        return {
            "reward_by_source": means({source: total} for source, total, _ in scored),
            "reward_parts": means(score.parts for *_, score in scored),
            "verifier_metrics": means(score.metrics for *_, score in scored),
        }

    def shard(self, rank: int) -> Shard:
        """Return one rank's rows, with the rewards of all groups.

        Raises:
            LedgerError: There is no such rank.
        """
        if not 0 <= rank < self._num_ranks:
            raise LedgerError(f"trainer ranks are 0..{self._num_ranks - 1}, got {rank}: check trainer.ranks")
        rewards_NG = [
            [np.nan if sample.total_reward is None else sample.total_reward for sample in group.samples]
            for group in self.batch.groups
        ]
        return Shard(
            batch_id=self.batch.batch_id,
            rank=rank,
            version=self.batch.version,
            rewards=np.array(rewards_NG, dtype=np.float32),
            rows=tuple(row for owner, row in self._rows if owner == rank),
            has_step_rewards=any(sample.step_rewards for group in self.batch.groups for sample in group.samples),
        )

    def groups(self, limit: int) -> list[Group]:
        """Return the first groups, whole."""
        pairs = list(zip(self.batch.groups, self._prompts, strict=True))[:limit]
        return [Group(group_id=group.group_id, prompt=prompt, samples=group.samples) for group, prompt in pairs]


def assign_rows(
    lengths: Sequence[int], *, num_minibatches: int, num_ranks: int, seed: int
) -> tuple[list[int], list[int]]:
    """Assign each row a minibatch and a rank.

    A seeded shuffle deals the rows into minibatches of equal size. Inside a minibatch the longest row goes to the rank
    with the fewest tokens so far, then the next longest, so that no rank waits long for another.

    Args:
        lengths: Tokens of each row, prompt and completion.
        num_minibatches: Optimiser updates of the step; must divide the number of rows.
        num_ranks: Trainer ranks; each gets at least one row of every minibatch.
        seed: Of the shuffle.

    Returns:
        The minibatch of each row and the rank of each row, in the order of `lengths`.
    """
    rows_per_minibatch, rest = divmod(len(lengths), num_minibatches)
    assert (rest, rows_per_minibatch >= num_ranks) == (0, True), "a recipe whose rows cannot be dealt is refused"
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    minibatches, ranks = [0] * len(lengths), [0] * len(lengths)
    for minibatch in range(num_minibatches):
        rows = order[minibatch * rows_per_minibatch : (minibatch + 1) * rows_per_minibatch]
        for row, rank in _balance(rows, lengths, num_ranks):
            minibatches[row], ranks[row] = minibatch, rank
    return minibatches, ranks


def _balance(rows: Sequence[int], lengths: Sequence[int], num_ranks: int) -> Iterable[tuple[int, int]]:
    """Yield (row, rank), longest row first, to the rank with the fewest tokens, then the fewest rows."""
    loads = [(0, 0, rank) for rank in range(num_ranks)]
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        num_tokens, num_rows, rank = min(loads)
        loads[rank] = (num_tokens + lengths[row], num_rows + 1, rank)
        yield row, rank
