"""The losses of the offline commands: supervised learning, the reward model, and direct preference learning.

An objective runs the model on a pass and returns [E, 1 + F]: each example's differentiable loss, and its figures. The
caller sums them over examples, passes and ranks, and divides by the sum of the examples' weights.

Shape letters: `E` examples of a forward pass, `B` its rows (an example's completions one after another), `T`
completion tokens, `F` figures.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from areal_lite.algo.logprobs import token_logprobs
from areal_lite.algo.preference import bradley_terry_loss, dpo_loss, simpo_loss
from areal_lite.config.offline import PreferenceConfig
from areal_lite.train.micro_batch import MicroBatch
from areal_lite.train.model import completion_logprobs, completion_outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One forward pass."""

    batch: MicroBatch
    lengths_B: Tensor
    """[B] int64 completion tokens of each row."""
    places_E: Tensor
    """[E] int64 places of the examples in their split."""
    reference_E2: Tensor | None
    """[E, 2] float32 log-probabilities of both completions under the reference; None where there is none."""


def supervised(model: nn.Module, part: Part, _: PreferenceConfig) -> Tensor:
    """Cross-entropy of the completion tokens, in nats; and how many of them are the most likely ones."""

    def read(logits_TV: Tensor, token_ids_T: Tensor) -> Tensor:
        correct_T = logits_TV.argmax(dim=-1) == token_ids_T
        return torch.stack([-token_logprobs(logits_TV, token_ids_T, temperature=1.0), correct_T.float()], dim=1)

    return _by_row(completion_outputs(model, part.batch, read, part.batch.token_ids_T), part)


def reward_model(model: nn.Module, part: Part, _: PreferenceConfig) -> Tensor:
    """Bradley-Terry likelihood of the preferences, in nats per pair; completions are scored at their last token."""
    scores_B = model(input_ids=part.batch.input_ids_RS, use_cache=False).logits.squeeze(-1).float()
    chosen_E, rejected_E = _pairs(scores_B[: len(part.lengths_B)])
    return _with_margins(bradley_terry_loss(chosen_E, rejected_E), chosen_E - rejected_E)


def direct_preference(model: nn.Module, part: Part, settings: PreferenceConfig) -> Tensor:
    """DPO, IPO or SimPO, per pair; a completion scores beta times its log-probability over the reference's."""
    chosen_E, rejected_E = _pairs(row_logprobs(model, part))
    lengths = dict(zip(("chosen_lengths_P", "rejected_lengths_P"), _pairs(part.lengths_B), strict=True))
    if settings.loss == "simpo":
        losses_E = simpo_loss(chosen_E, rejected_E, **lengths, beta=settings.beta, margin=settings.simpo_margin)
    else:
        assert part.reference_E2 is not None, "the reference runs before the first step"
        reference_chosen_E, reference_rejected_E = part.reference_E2.unbind(dim=1)
        losses_E = dpo_loss(
            chosen_E,
            rejected_E,
            reference_chosen_P=reference_chosen_E,
            reference_rejected_P=reference_rejected_E,
            beta=settings.beta,
            kind=settings.loss,
            label_smoothing=settings.label_smoothing,
            **(lengths if settings.length_normalised else {}),
        )
        chosen_E, rejected_E = chosen_E - reference_chosen_E, rejected_E - reference_rejected_E
    if settings.loss == "simpo" or settings.length_normalised:
        chosen_E, rejected_E = chosen_E / lengths["chosen_lengths_P"], rejected_E / lengths["rejected_lengths_P"]
    return _with_margins(losses_E, settings.beta * (chosen_E - rejected_E))


OBJECTIVES: Mapping[str, Callable[[nn.Module, Part, PreferenceConfig], Tensor]] = {
    "sft": supervised,
    "reward_model": reward_model,
    "dpo": direct_preference,
}
"""By command. Figures: `accuracy`, the share of tokens that are the greedy choice, or of pairs in the right order (a
tie counts half), and for pairs `margin`, how much better the chosen completion scores."""


def weights(part: Part, command: str) -> Tensor:
    """Return each example's weight, [E]: its completion tokens, or 1 for a pair."""
    return part.lengths_B if command == "sft" else torch.ones_like(part.places_E)


def row_logprobs(model: nn.Module, part: Part) -> Tensor:
    """Return the log-probability of each row's completion, [B] float32 nats: the sum over its tokens."""
    return _by_row(completion_logprobs(model, part.batch), part)


def _by_row(values_T: Tensor, part: Part) -> Tensor:
    """Sum the values of each row's completion tokens."""
    rows_T = torch.repeat_interleave(torch.arange(len(part.lengths_B), device=part.lengths_B.device), part.lengths_B)
    return values_T.new_zeros((len(part.lengths_B), *values_T.shape[1:])).index_add(0, rows_T, values_T)


def _pairs(values_B: Tensor) -> Sequence[Tensor]:
    """Split the rows' values into those of the chosen and those of the rejected completions."""
    return values_B.view(-1, 2).unbind(dim=1)


def _with_margins(losses_E: Tensor, margin_E: Tensor) -> Tensor:
    """Stack the losses with which pairs are in the right order (a tie counts half) and the margins."""
    right_E = (margin_E > 0).float() + 0.5 * (margin_E == 0).float()
    return torch.stack([losses_E, right_E, margin_E.detach()], dim=1)
