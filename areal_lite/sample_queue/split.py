"""Splitting a taken batch: which optimiser update and which trainer rank each row belongs to.

The queue calls it once per batch, after whole groups were taken, so that a rank that fetches again gets the same rows.
"""

import random
from collections.abc import Iterable, Sequence


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
