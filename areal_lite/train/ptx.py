"""The language-model term of PPO-ptx: some documents of a text file beside every policy update.

A document's first token is left out: nothing predicts it.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from areal_lite.config.recipe import Config
from areal_lite.data.encode import encode_texts
from areal_lite.errors import ConfigError, DataError
from areal_lite.train.micro_batch import MicroBatch, TokenRows, split_micro_batches
from areal_lite.train.optimiser import Share
from areal_lite.train.score import logprobs_of


def load_documents(path: str, *, tokenizer: Any, max_tokens: int) -> list[list[int]]:
    """Read a text file with one document a line; empty lines are passed over.

    Args:
        path: UTF-8 text.
        tokenizer: The policy's; its end-of-sequence token, if it has one, is put behind every document.
        max_tokens: Longer documents are cut to this, which also cuts the end of sequence off.

    Returns:
        Token ids of each document, at least two.

    Raises:
        ConfigError: The file cannot be read.
        DataError: A line cannot be tokenised or gives fewer than two tokens, or there is no document.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"objective.ptx_path must be a UTF-8 text file, got {path}: {error}") from error
    texts = {f"line {number} of {path}": line for number, line in enumerate(lines, start=1) if line.strip()}
    if not texts:
        raise DataError(f"objective.ptx_path must hold a document on some line, got only empty lines in {path}")
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    encoded = encode_texts(list(texts.values()), origins=list(texts), tokenizer=tokenizer, add_special_tokens=False)
    documents = [[*token_ids, *eos][:max_tokens] for token_ids in encoded]
    for (origin, line), document in zip(texts.items(), documents, strict=True):
        if len(document) < 2:
            raise DataError(
                f"{origin} must give at least two tokens, the second of which is predicted, got {len(document)} from "
                f"{line[:80]!r}: remove it"
            )
    return documents


class PtxDocuments:
    """The documents, and which of them an update sees: a function of seed, version and minibatch alone."""

    def __init__(self, config: Config, *, tokenizer_folder: str, rank: int) -> None:
        """Load the documents; every rank holds all of them.

        Raises:
            ConfigError: The file cannot be read.
            DataError: It holds no documents, or one that cannot be tokenised.
        """
        self._config, self._mine = config, slice(rank // config.trainer.mesh.same_rows, None, config.trainer.row_ranks)
        self._device = torch.device(config.run.device)
        self._documents = load_documents(
            str(config.objective.ptx_path),  # a recipe without one is refused before
            tokenizer=AutoTokenizer.from_pretrained(tokenizer_folder),
            max_tokens=config.model.max_context,
        )

    def shares(self, model: nn.Module, *, version: int, minibatch: int) -> list[Share]:
        """Return this rank's shares of `ptx_coef * mean of - log pi(token)` over an update's documents; collective."""
        chosen = self._choose(version=version, minibatch=minibatch)
        mine = TokenRows((document[:1], document[1:]) for document in chosen[self._mine])
        budget = self._config.trainer.micro_batches
        (parts,) = split_micro_batches(mine, [range(len(mine))], device=self._device, **budget)
        logprobs = logprobs_of(torch.from_numpy(mine.output_ids).to(self._device), temperature=1.0)
        num_tokens = sum(len(document) - 1 for document in chosen)

        def share(part: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            loss = -logprobs(model, part).sum() / num_tokens
            return self._config.objective.ptx_coef * loss, {"ptx_loss": loss.detach()}

        return [partial(share, part) for part in parts]

    def _choose(self, *, version: int, minibatch: int) -> list[list[int]]:
        rng = np.random.default_rng([self._config.run.seed, version, minibatch])
        size, number = self._config.objective.ptx_batch, len(self._documents)
        # A file with fewer documents than a batch gives every one of them, some more often than others.
        order = np.concatenate([rng.permutation(number) for _ in range(-(-size // number))])
        return [self._documents[index] for index in order[:size]]
