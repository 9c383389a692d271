"""The language-model term of PPO-ptx: some documents of a text file beside every policy update.

A document's first token is left out: nothing predicts it.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from areal_lite.config.recipe import Config
from areal_lite.data.encode import encode_texts
from areal_lite.errors import ConfigError, DataError
from areal_lite.train.micro_batch import MicroBatch, TokenRows, split_micro_batches
from areal_lite.train.model import completion_logprobs
from areal_lite.train.optimiser import Share


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


def choose_documents(
    documents: Sequence[list[int]], *, config: Config, version: int, minibatch: int
) -> list[list[int]]:
    """Return those of an update: they follow from seed, version and minibatch alone."""
    rng = np.random.default_rng([config.run.seed, version, minibatch])
    size, number = config.objective.ptx_batch, len(documents)
    # A file with fewer documents than a batch gives every one of them, some more often than others.
    order = np.concatenate([rng.permutation(number) for _ in range(-(-size // number))])
    return [documents[index] for index in order[:size]]


def ptx_shares(documents: Sequence[list[int]], model: nn.Module, *, config: Config, rank: int) -> list[Share]:
    """Return a rank's shares of `ptx_coef * mean of - log pi(token)` over an update's documents; collective."""
    trainer, device = config.trainer, torch.device(config.run.device)
    mine = documents[rank // trainer.mesh.same_rows :: trainer.row_ranks]
    rows = TokenRows((document[:1], document[1:]) for document in mine)
    (parts,) = split_micro_batches(rows, [range(len(rows))], device=device, **trainer.micro_batches)
    num_tokens = sum(len(document) - 1 for document in documents)

    def share(part: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        loss = -completion_logprobs(model, part).sum() / num_tokens
        return config.objective.ptx_coef * loss, {"ptx_loss": loss.detach()}

    return [partial(share, part) for part in parts]
