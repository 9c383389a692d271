"""What a language model says of a few fixed tokens: saved beside it, and compared once a run has loaded it again.

A manifest finds files that changed; this finds a state that came out of good files wrong. `checkpoint.py` calls it.

Shape letters: `T` tokens, `V` vocabulary.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_lite.algo.logprobs import token_entropies, token_logprobs
from areal_lite.errors import CheckpointError
from areal_lite.train.distributed import device_of
from areal_lite.train.micro_batch import MicroBatch
from areal_lite.train.model import completion_outputs, reshard

logger = logging.getLogger(__name__)


@torch.no_grad()
def model_outputs(model: Any, tokens: Sequence[int] | None = None) -> dict[str, Any] | None:
    """Run a model over 4 sequences of 16 tokens; collective, alike on any number of ranks.

    Args:
        model: A transformers model, sharded or not; its gathered parameters are dropped afterwards.
        tokens: One for each place; the most likely ones where none are given.

    Returns:
        `tokens`, their `logprobs`, and the mean `entropy` in nats; None for a model of values or scores.
    """
    if model.get_output_embeddings() is None:
        return None
    places_T, vocabulary = torch.arange(64, device=device_of(model)), model.get_input_embeddings().num_embeddings
    input_ids = (places_T * 7919 % vocabulary).view(4, 16)
    batch = MicroBatch(
        input_ids_RS=input_ids, predictors_T=places_T, tokens_T=places_T, token_ids_T=places_T, rows=range(4)
    )

    def read(logits_TV: Tensor, *given: Tensor) -> Tensor:
        tokens_T = given[0] if given else logits_TV.argmax(dim=1)
        logprobs_T = token_logprobs(logits_TV, tokens_T, temperature=1.0)
        return torch.stack([tokens_T.float(), logprobs_T, token_entropies(logits_TV, temperature=1.0)], dim=1)

    given = () if tokens is None else (torch.tensor(tokens, device=places_T.device),)
    tokens_T, logprobs_T, entropies_T = completion_outputs(model, batch, read, *given).T.contiguous()
    reshard(model)
    return {
        "tokens": tokens_T.long().tolist(),
        "logprobs": logprobs_T.tolist(),
        "entropy": entropies_T.mean().item(),
    }


def check_outputs(model: Any, saved: Mapping[str, Any] | None, *, folder: Path, limit: float) -> None:
    """Compare a model that was loaded with what it said when it was saved; collective.

    Args:
        saved: What `model_outputs` returned, and the `limit` of then; None in a checkpoint of an earlier version.
        folder: Where it was loaded from.
        limit: Nats; log-probabilities, on average, and the entropy may differ by a tenth of it, as nothing but the
            machine is another, or by a tenth of the saved one, if it is more; 0 = any.

    Raises:
        CheckpointError: They differ by more.
    """
    found = model_outputs(model, None if saved is None else saved["tokens"])
    if found is None:
        return
    if saved is None:
        logger.warning("%s does not say what its model's outputs were: what was loaded is not compared", folder)
        return
    difference = float(np.abs(np.subtract(found["logprobs"], saved["logprobs"])).mean())
    entropy, expected = found["entropy"], saved["entropy"]
    logger.info("%s: log-probabilities are within %.2g nats of those saved, on average", folder, difference)
    allowed = max(limit, saved["limit"]) / 10
    if limit and not (difference <= allowed and abs(entropy - expected) <= allowed):  # neither holds of NaN
        raise CheckpointError(
            f"the model loaded from {folder} must be the one that was saved: expected, of {len(found['tokens'])} fixed "
            f"tokens, {np.mean(saved['logprobs']):.4g} nats as mean log-probability and an entropy of {expected:.4g}, "
            f"got {np.mean(found['logprobs']):.4g} and {entropy:.4g}; they differ by {difference:.3g} a token, "
            f"{allowed:g} at most: choose an older checkpoint with run.resume_from=step-N; where packages or machines "
            "changed since, go back to those; an RL run may allow more (weights.parity_limit, ten times that)"
        )
