"""From rows of different lengths to padded forward passes under a token budget.

Per-token quantities live in one order, row after row, completion tokens only; a micro-batch names its tokens by their
place in that order, so that the way rows are split or sorted changes nothing but speed.

Two rows, prompt `ab` with completion `cd`, prompt `e` with completion `f`:

    completion tokens    c d f
    input_ids_RS         a b c d | e f . .     padded on the right
    predictors_T         1 2 | 4               places in the flattened input_ids whose logits predict c d f
    tokens_T             0 1 2                 the places of c d f among the completion tokens

Packed, there is one row, `a b c d e f`, with positions `0 1 2 3 0 1`: where they restart, attention does too.

Shape letters: `R` rows and `S` padded columns of a micro-batch, `T` its completion tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from areal_lite.train.distributed import max_over_ranks

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward pass. There is no attention mask: causal attention never sees right padding."""

    input_ids_RS: Tensor
    """[R, S] int64, padded with 0, which any vocabulary has."""
    predictors_T: Tensor
    """[T] int64 places in the flattened `input_ids_RS`."""
    tokens_T: Tensor
    """[T] int64 places among the completion tokens of all rows."""
    token_ids_T: Tensor
    """[T] int64 completion tokens."""
    rows: Sequence[int]
    """Which rows; none in a pass that exists only because other ranks have one."""
    position_ids_RS: Tensor | None = None
    """[1, S] int64 places in their own rows of tokens that are packed into one; None where each row is one."""
    routes_RSLK: Tensor | None = None
    """[R, S, L, K] int16 experts of each of L layers; -1 where the router chooses; None where it does everywhere."""


class TokenRows:
    """Prompts with completions, and the order of their completion tokens."""

    def __init__(
        self,
        rows: Iterable[tuple[Sequence[int], Sequence[int] | npt.NDArray[np.int32]]],
        routes: Sequence[npt.NDArray[Any] | None] | None = None,
    ) -> None:
        """Lay out (prompt token ids, completion token ids) pairs.

        Args:
            routes: `Sample.routes` of each row.

        Raises:
            ValueError: A prompt is empty, so that nothing predicts the first completion token.
        """
        pairs = [(np.asarray(prompt, np.int64), np.asarray(output, np.int64)) for prompt, output in rows]
        if any(len(prompt) == 0 for prompt, _ in pairs):
            raise ValueError("expected prompts of at least one token, got an empty one. Fix: add a start token to it")
        self.prompt_lengths = [len(prompt) for prompt, _ in pairs]
        self.output_lengths = [len(output) for _, output in pairs]
        self.offsets = np.cumsum([0, *self.output_lengths])
        self.sequences = [np.concatenate(pair) for pair in pairs]
        self.routes = [None] * len(pairs) if routes is None else list(routes)
        self.output_ids = np.concatenate([np.empty(0, np.int64), *(output for _, output in pairs)])

    def __len__(self) -> int:
        return len(self.sequences)

    def spread(self, values_B: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
        """Repeat one value per row over the row's completion tokens."""
        return np.repeat(values_B, self.output_lengths)

    def split(self, values: npt.NDArray[np.float32]) -> list[npt.NDArray[np.float32]]:
        """Cut a per-token array into one array per row."""
        return [values[start:end] for start, end in pairwise(self.offsets)]


def pack_rows(lengths: Sequence[int], *, max_tokens: int, packed: bool = False) -> list[list[int]]:
    """Group rows of similar length so that each group, padding included, stays within a budget.

    Args:
        lengths: Tokens of each row, prompt and completion.
        max_tokens: Tokens of a group at most; a single longer row still gets a group of its own.
        packed: Rows need no padding: a group takes their sum instead of rows x longest.

    Returns:
        Groups of indices into `lengths`, shortest rows first; equal lengths keep their order.

    >>> pack_rows([5, 2, 9, 2], max_tokens=10)
    [[1, 3], [0], [2]]
    """
    groups: list[list[int]] = []
    used = 0
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        used = used + lengths[row] if packed else (len(groups[-1]) + 1 if groups else 1) * lengths[row]
        if groups and used <= max_tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
            used = lengths[row]
    return groups


def split_micro_batches(
    rows: TokenRows,
    updates: Iterable[Sequence[int]],
    *,
    max_tokens: int,
    device: torch.device,
    packed: bool = False,
    padding: int = 0,
    together: int = 1,
) -> list[list[MicroBatch]]:
    """Build the micro-batches of each optimiser update, equally many on every rank; collective.

    FSDP gathers parameters in every forward and backward pass, so the others would wait forever for a rank with fewer
    passes: it gets empty ones, of one padding token, which train nothing.

    Args:
        updates: Indices of the rows of each update.
        max_tokens: Tokens of one forward pass at most, padding included.
        packed: Put the rows of a pass one after another, without padding.
        padding: Token id after shorter rows; 0 where nothing looks at it.
        together: Number of consecutive rows that stay in one pass.
    """
    split, build = [], partial(micro_batch, rows, device=device, padding=padding, packed=packed)
    for chosen in updates:
        units = [chosen[start : start + together] for start in range(0, len(chosen), together)]
        lengths = [max(len(rows.sequences[row]) for row in unit) for unit in units]
        groups = pack_rows(lengths, max_tokens=max_tokens // together, packed=packed)
        split.append([build([row for index in group for row in units[index]]) for group in groups])
    counts = torch.tensor([len(batches) for batches in split], device=device)
    missing = (max_over_ranks(counts) - counts).tolist()
    empty = replace(micro_batch(TokenRows([([0], [])]), [0], device=device), rows=())
    return [[*batches, *[empty] * number] for batches, number in zip(split, missing, strict=True)]


def micro_batch(
    rows: TokenRows, chosen: Sequence[int], *, device: torch.device, padding: int = 0, packed: bool = False
) -> MicroBatch:
    """Put rows into one forward pass, in the order given.

    Args:
        chosen: Indices of at least one row.
        padding: Token id after shorter rows; 0 where nothing looks at it.
        packed: Put them one after another, without padding.
    """
    sequences = [rows.sequences[row] for row in chosen]
    lengths = [len(sequence) for sequence in sequences]
    width = max(lengths)
    starts = np.cumsum([0, *lengths[:-1]]) if packed else np.arange(len(chosen)) * width
    input_ids = np.full((1, sum(lengths)) if packed else (len(chosen), width), padding, np.int64)
    predictors, tokens, routes = [], [], None
    for start, row, sequence in zip(starts, chosen, sequences, strict=True):
        end = start + len(sequence)
        input_ids.reshape(-1)[start:end] = sequence
        predictors.append(np.arange(start + rows.prompt_lengths[row] - 1, end - 1))
        tokens.append(np.arange(rows.offsets[row], rows.offsets[row + 1]))
        if (own := rows.routes[row]) is not None:
            if routes is None:
                routes = np.full((*input_ids.shape, *own.shape[1:]), -1, np.int16)
            routes.reshape(-1, *own.shape[1:])[end - 1 - len(own) : end - 1] = own
    positions = np.concatenate([np.arange(length) for length in lengths])[None] if packed else None
    places = np.concatenate(tokens)

    def on_device(array: npt.NDArray[Any] | None) -> Any:
        return None if array is None else torch.from_numpy(array).to(device)

    return MicroBatch(
        input_ids_RS=on_device(input_ids),
        predictors_T=on_device(np.concatenate(predictors)),
        tokens_T=on_device(places),
        token_ids_T=on_device(rows.output_ids[places]),
        rows=chosen,
        position_ids_RS=on_device(positions),
        routes_RSLK=on_device(routes),
    )
