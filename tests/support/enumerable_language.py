"""A policy over a language small enough to write down whole: exact returns, gradients and expectations.

Symbol 0 ends a sequence; a sequence of the full length ends without it, as one cut off at the token limit. A policy is
a free table of logits, one row for each prefix, in float64. An expectation is a sum over all batches, weighted with
their probabilities: nothing is sampled.

Shape letters: `X` prefixes, `V` symbols, `S` sequences; `B` rows and `T` tokens of a batch.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One possible draw of sequences, in the flat order of completion tokens."""

    sequences_B: Tensor
    """[B] which sequences were drawn."""
    lengths_B: Tensor
    rows_T: Tensor
    prefixes_T: Tensor
    symbols_T: Tensor

    def at_tokens(self, table_XV: Tensor) -> Tensor:
        """Return a table's value at each token: its prefix and its symbol."""
        return table_XV[self.prefixes_T, self.symbols_T]


class Language:
    """All sequences over some symbols up to a length."""

    def __init__(self, *, num_symbols: int, max_length: int) -> None:
        words = range(1, num_symbols)
        self.num_symbols, self.max_length = num_symbols, max_length
        self.prefixes = [p for length in range(max_length) for p in itertools.product(words, repeat=length)]
        ended = [(*prefix, 0) for prefix in self.prefixes]
        self.sequences: list[tuple[int, ...]] = [*ended, *itertools.product(words, repeat=max_length)]
        self.lengths_S = torch.tensor([len(sequence) for sequence in self.sequences])
        place = {prefix: x for x, prefix in enumerate(self.prefixes)}
        self._steps = [[(place[s[:t]], s[t]) for t in range(len(s))] for s in self.sequences]
        self.uses_SXV = torch.zeros(len(self.sequences), len(self.prefixes), num_symbols, dtype=torch.float64)
        for s, steps in enumerate(self._steps):
            for x, symbol in steps:
                self.uses_SXV[s, x, symbol] = 1.0

    def random_table(self, seed: int, *, scale: float = 1.0) -> Tensor:
        """Draw an [X, V] table: logits, or anything else that prefixes and symbols have."""
        generator = torch.Generator().manual_seed(seed)
        return scale * torch.randn(len(self.prefixes), self.num_symbols, dtype=torch.float64, generator=generator)

    def random_rewards(self, seed: int) -> Tensor:
        """Draw [S] rewards in -2..2, multiples of 1/64, which float32 holds exactly."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(-128, 129, (len(self.sequences),), generator=generator).double() / 64

    def sequence_logprobs(self, logprobs_XV: Tensor) -> Tensor:
        """Return the [S] log-probability of each sequence."""
        return torch.einsum("sxv,xv->s", self.uses_SXV, logprobs_XV)

    def visits(self, logprobs_XV: Tensor) -> Tensor:
        """Return the [X] probability that a sequence passes through each prefix."""
        return torch.einsum("s,sxv->x", self.sequence_logprobs(logprobs_XV).exp(), self.uses_SXV)

    def action_values(self, logprobs_XV: Tensor, rewards_S: Tensor) -> Tensor:
        """Return Q, [X, V]: the expected reward of a sequence that continues a prefix with a symbol."""
        probabilities_S = self.sequence_logprobs(logprobs_XV).exp()
        sums_XV = torch.einsum("s,s,sxv->xv", probabilities_S, rewards_S, self.uses_SXV)
        return sums_XV / torch.einsum("s,sxv->xv", probabilities_S, self.uses_SXV)

    def state_values(self, logprobs_XV: Tensor, rewards_S: Tensor) -> Tensor:
        """Return V, [X]: the expected reward of a sequence that has come to a prefix."""
        return (logprobs_XV.exp() * self.action_values(logprobs_XV, rewards_S)).sum(dim=1)

    def batches(self, num_rows: int) -> Iterator[Batch]:
        """Yield every ordered draw of so many sequences."""
        for drawn in itertools.product(range(len(self.sequences)), repeat=num_rows):
            steps = torch.tensor([step for s in drawn for step in self._steps[s]])
            lengths_B = self.lengths_S[list(drawn)]
            yield Batch(
                sequences_B=torch.tensor(drawn),
                lengths_B=lengths_B,
                rows_T=torch.repeat_interleave(torch.arange(num_rows), lengths_B),
                prefixes_T=steps[:, 0],
                symbols_T=steps[:, 1],
            )


def gradient_of(objective: Callable[[Tensor], Tensor], logits_XV: Tensor) -> Tensor:
    """Return the gradient by the logits of a scalar function of the policy's [X, V] log-probabilities."""
    logits_XV = logits_XV.clone().requires_grad_()
    (gradient_XV,) = torch.autograd.grad(objective(logits_XV.log_softmax(dim=1)), logits_XV)
    return gradient_XV


def expected_step(
    language: Language,
    loss: Callable[[Batch, Tensor], Tensor],
    *,
    logits_XV: Tensor,
    num_rows: int,
    behaviour_logits_XV: Tensor | None = None,
) -> Tensor:
    """Return the expected direction of ascent, minus the expected gradient of a batch's loss, over all batches.

    Args:
        loss: From a batch and the current [X, V] log-probabilities to the batch's loss.
        behaviour_logits_XV: What the batches are drawn from; None = the current policy.
    """
    sampled_XV = logits_XV if behaviour_logits_XV is None else behaviour_logits_XV
    logprobs_S = language.sequence_logprobs(sampled_XV.log_softmax(dim=1)).detach()

    def mean_loss(logprobs_XV: Tensor) -> Tensor:
        batches = language.batches(num_rows)
        return sum(
            (logprobs_S[batch.sequences_B].sum().exp() * loss(batch, logprobs_XV) for batch in batches), torch.zeros(())
        )

    return -gradient_of(mean_loss, logits_XV)


def relative_distance(step_XV: Tensor, exact_XV: Tensor) -> float:
    """Return how far a step is from the exact one, as a share of its length."""
    return float((step_XV - exact_XV).norm() / exact_XV.norm())


def draw(rewards_NS: Sequence[Tensor], batch: Batch) -> Tensor:
    """Return the [N, G] rewards of a batch whose rows are the groups one after another, one reward table per group."""
    sequences_NG = batch.sequences_B.view(len(rewards_NS), -1)
    return torch.stack([rewards_S[chosen] for rewards_S, chosen in zip(rewards_NS, sequences_NG, strict=True)])
