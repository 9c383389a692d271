"""The verifier `reward_model`: the score that a model of `areal-lite reward-model` gives a completion.

Heavy imports happen inside: a recipe's arguments are checked with this file.
"""

import functools
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from areal_lite.config.data import CHAT
from areal_lite.config.section import Arguments, ModelFolder
from areal_lite.data.completions import split_turn
from areal_lite.data.encode import encode_text, end_tokens
from areal_lite.record.paths import find_model_folder
from areal_lite.verify.result import Rows, Texts, batched, prepared_by

_CALL_SIZE = 64


@prepared_by(lambda self: self._loaded)
@batched(_CALL_SIZE)
class reward_model(Arguments):
    """Score completions as the reward model was trained to: prompt, completion, end of sequence (in a chat: of turn).

    Only differences between completions of one prompt mean something. Prompts are as the policy saw them, chat template
    included.

    A verifier does not know why a completion ended: one that was cut off at the token limit gets its end of sequence
    too, and is scored as if it had ended there (`objective.overlong_buffer` and `mask_truncated` are what length is
    charged with). A text that fills the model's context is scored without one.

    The score is read where transformers reads it, at the last token that is not the model's padding. Models of
    `areal-lite reward-model` have a padding token of their own; one from elsewhere whose padding is its end of
    sequence is read at the token before it, as it was in its own training. A score does not depend on its neighbours.
    """

    model: ModelFolder
    """the reward model's folder, or the folder of its run"""
    device: str = "cpu"
    """where it computes; each process of the verifier holds a copy"""
    max_batch: int = Field(16, ge=1)
    """texts in one forward pass at most; texts of similar length share one"""

    @functools.cached_property
    def _loaded(self) -> tuple[Any, Any]:
        """The tokenizer and the model."""
        import torch
        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

        folder = find_model_folder(self.model, option="verifier.arguments.model")
        # From another model's folder, transformers would make up a head of random numbers.
        if not any("SequenceClassification" in name for name in AutoConfig.from_pretrained(folder).architectures or []):
            raise ValueError(
                f"verifier.arguments.model must be a reward model, got {folder}, whose model gives no score"
            )
        scorer = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        return AutoTokenizer.from_pretrained(folder), scorer.to(self.device).eval()

    @functools.cached_property
    def _turn_end(self) -> list[int]:
        """The tokens after an answer of a chat, up to where generation stops."""
        tokenizer, _ = self._loaded
        if tokenizer.chat_template is None:
            return [tokenizer.eos_token_id]
        _, ids = split_turn("1", "2", tokenizer, chat=True, ends=end_tokens(tokenizer, tokenizer.name_or_path))
        return ids[len(encode_text("2", tokenizer)) :]

    def __call__(self, prompts: Texts, completions: Texts, answers: Texts, rows: Rows, /) -> list[float]:
        """Return a score each; a `ValueError` where a text is longer than the model can read."""
        tokenizer, scorer = self._loaded
        limit = getattr(scorer.config, "max_position_embeddings", None)
        texts = [
            _token_ids(prompt, completion, tokenizer, turn_end=self._turn_end if CHAT in row else None, limit=limit)
            for prompt, completion, row in zip(prompts, completions, rows, strict=True)
        ]
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]), reverse=True)
        scores = [0.0] * len(texts)
        for start in range(0, len(order), self.max_batch):
            part = order[start : start + self.max_batch]
            for index, score in zip(part, _forward(scorer, [texts[index] for index in part]), strict=True):
                scores[index] = score
        return scores


def _token_ids(
    prompt: str, completion: str, tokenizer: Any, *, turn_end: list[int] | None, limit: int | None
) -> list[int]:
    """Return what training makes of a pair; `turn_end` is of a chat, whose template wrote the start too."""
    ids = encode_text(prompt, tokenizer, add_special_tokens=turn_end is None) + encode_text(completion, tokenizer)
    if limit is not None and len(ids) > limit:
        raise ValueError(f"the reward model reads at most {limit} tokens, got {len(ids)}: lower rollout.max_new_tokens")
    return [*ids, *([tokenizer.eos_token_id] if turn_end is None else turn_end)][:limit]


def _forward(scorer: Any, texts: Sequence[Sequence[int]]) -> list[float]:
    """Score texts in one pass, padded on the right.

    transformers reads the score at the last token that is not the model's padding: what is filled in has to be that
    very token, and a model without one gets its texts one by one, as it takes no batch.
    """
    import torch

    padding = scorer.config.get_text_config().pad_token_id
    if padding is None and len(texts) > 1:
        return [_forward(scorer, [text])[0] for text in texts]
    width = max(map(len, texts))
    ids_BT = torch.tensor([[*text, *[padding] * (width - len(text))] for text in texts], device=scorer.device)
    mask_BT = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in texts], device=scorer.device)
    with torch.inference_mode():
        scores_B = scorer(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits[:, 0]
    return [float(score) for score in scores_B]
