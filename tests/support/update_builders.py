"""The loss of a trainer's update where tables of numbers stand for its models: everything but the models is real."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from areal_lite.config.recipe import Config
from areal_lite.train import objective as objective_module
from areal_lite.train.advantages import batch_advantages
from areal_lite.train.batch import PolicyBatch
from areal_lite.train.objective import UpdateLoss, find_loss_function, weigh_tokens
from areal_lite.train.score import filter_tokens
from areal_lite.types import Row, Sample, Shard, StopReason, VersionSpan


def table_shard(rewards_NG: Tensor, token_ids: list[Tensor], *, behaviour_T: Tensor, truncated_B: Tensor) -> Shard:
    """Build the shard that the queue would hand over: completions, their behaviour logprobs, how they ended, rewards.

    Args:
        token_ids: The completion of each row, group after group.
    """
    rows, num_samples = [], rewards_NG.shape[1]
    logprobs = behaviour_T.split([len(ids) for ids in token_ids])
    for index, (ids, of_row, truncated) in enumerate(zip(token_ids, logprobs, truncated_B.tolist(), strict=True)):
        sample = Sample(
            token_ids=ids.numpy().astype(np.int32),
            logprobs=of_row.numpy().astype(np.float32),
            spans=(VersionSpan(version=0, start=0, end=len(ids)),),
            stop_reason=StopReason.LENGTH if truncated else StopReason.STOP,
        )
        group, place = divmod(index, num_samples)
        rows.append(Row(group_index=group, sample_index=place, minibatch=0, prompt_token_ids=(0,), sample=sample))
    return Shard(batch_id="0", rank=0, version=0, rewards=rewards_NG.numpy().astype(np.float32), rows=tuple(rows))


def update_loss(
    shard: Shard,
    outputs: Callable[..., Tensor],
    *,
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    proximal_T: Tensor,
    reference_T: Tensor | None = None,
    values_T: Tensor | None = None,
    current_T: Tensor | None = None,
    mask_T: Tensor | None = None,
) -> Tensor:
    """Plan a batch of one update as the trainer does, and return its loss.

    Args:
        outputs: The policy's, from a micro-batch, the function that reads logits, and token ids.
        current_T: Logprobs that m2po chooses by after earlier updates; None = the proximal ones, as in the first.
        mask_T: Which tokens are young enough; None = all.
    """
    monkeypatch.setattr(objective_module, "completion_outputs", lambda _, *given: outputs(*given))
    batch = PolicyBatch.from_shard(shard, config=config, device=torch.device("cpu"))
    tokens, kl_coef = batch.tokens, config.objective.kl_coef
    if mask_T is not None:
        tokens.loss_mask_T &= mask_T
        tokens.kept_T &= mask_T
    tokens.proximal_logprobs_T = proximal_T.float()
    tokens.reference_logprobs_T = None if reference_T is None else reference_T.float()
    tokens.values_T = None if values_T is None else values_T.float()
    batch_advantages(batch, config=config, kl_coef=kl_coef)
    weigh_tokens(batch, config)
    tokens.proximal_logprobs_T = (proximal_T if current_T is None else current_T).float()
    filter_tokens(batch, 0, policy=torch.nn.Identity(), config=config)
    tokens.proximal_logprobs_T = proximal_T.float()
    share_of = UpdateLoss(
        batch=batch,
        model=torch.nn.Identity(),
        config=config,
        is_first=False,
        kl_coef=kl_coef,
        policy_term=find_loss_function(config.objective),
    )
    return torch.stack([share_of(part)[0] for part in batch.micro_batches]).sum()
