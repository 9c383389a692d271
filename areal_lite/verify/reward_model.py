"""A learned reward: the score that a model of `areal-lite reward-model` gives a completion.

Named in a recipe as `areal_lite.verify.reward_model:reward_model`, with `verifier.arguments: {model: FOLDER}`, a
model's folder or the folder of the run that made it. Runs in the verifier's process, which loads the model once.
"""

import functools
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from areal_lite.model_folder import find_model_folder
from areal_lite.verify.protocol import prepared_by

__all__ = ["reward_model"]


def _prepare(*, model: str, device: str = "cpu") -> None:
    _load(model, device)


@functools.cache
def _load(model: str, device: str) -> tuple[Any, Any]:
    """Return the tokenizer and the model."""
    folder = find_model_folder(model, option="verifier.arguments.model")
    # From another model's folder, transformers would make up a head of random numbers.
    if not any("SequenceClassification" in name for name in AutoConfig.from_pretrained(folder).architectures or []):
        raise ValueError(f"verifier.arguments.model must be a reward model, got {folder}, whose model gives no score")
    scorer = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(folder), scorer.to(device).eval()


@prepared_by(_prepare)
def reward_model(prompt: str, completion: str, answer: str, *, model: str, device: str = "cpu", **row: Any) -> float:
    """Score a completion as the reward model was trained to: prompt, completion, end of sequence.

    A verifier is not told why a completion ended: one that was cut off at the token limit gets its end of sequence
    too, and is scored as if it had ended there (`objective.overlong_buffer` and `mask_truncated` are what length is
    charged with). A text that fills the model's context is scored without one.

    The score is read where transformers reads it, at the last token that is not the model's padding. Models of
    `areal-lite reward-model` have a padding token of their own; one from elsewhere whose padding is its end of
    sequence is read at the token before it, as it was in its own training.

    Args:
        prompt: As the policy saw it, chat template included.
        completion: What the policy wrote.
        answer: Not looked at.
        model: The reward model's folder, or the folder of its run.
        device: Where it computes; each process of the verifier holds a copy.
        **row: Not looked at.

    Returns:
        The score; only differences between completions of one prompt mean something.

    Raises:
        ValueError: The text is longer than the model can read.
    """
    tokenizer, scorer = _load(model, device)
    ids = [
        *tokenizer(prompt, add_special_tokens=not _starts_with_special(prompt, tokenizer))["input_ids"],
        *tokenizer(completion, add_special_tokens=False)["input_ids"],
    ]
    limit = getattr(scorer.config, "max_position_embeddings", None)
    if limit is not None and len(ids) > limit:
        raise ValueError(f"the reward model reads at most {limit} tokens, got {len(ids)}: lower rollout.max_new_tokens")
    ids = [*ids, tokenizer.eos_token_id][:limit]
    with torch.inference_mode():
        return float(scorer(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0, 0])


def _starts_with_special(prompt: str, tokenizer: Any) -> bool:
    """Whether the prompt was written by a chat template, which puts the start token itself."""
    return tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
