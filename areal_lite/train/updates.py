"""The optimiser updates of one step: on each minibatch the policy, then the critic. Called by the trainer."""

from collections.abc import Sequence
from functools import partial

import torch

from areal_lite.config.recipe import Config
from areal_lite.train.batch import PolicyBatch
from areal_lite.train.critic import Critic
from areal_lite.train.micro_batch import MicroBatch
from areal_lite.train.objective import PolicyUpdateLoss
from areal_lite.train.passes import Scores
from areal_lite.train.plan import StepPlan
from areal_lite.train.ptx import PtxDocuments
from areal_lite.train.schedule import learning_rate
from areal_lite.train.stats import StepTally
from areal_lite.train.step import Learner

__all__ = ["StepUpdates"]


class StepUpdates:
    """Everything that the updates of a step change, and the tally of what they did."""

    def __init__(
        self, config: Config, *, learner: Learner, critic: Critic | None, ptx: PtxDocuments | None, version: int
    ) -> None:
        """Prepare the updates of one step.

        Args:
            config: The recipe.
            learner: The policy and its optimiser.
            critic: Trained on the same minibatches, if there is one.
            ptx: Documents beside every policy update, if there are any.
            version: Completed trainer steps.
        """
        self._config, self._learner, self._critic, self._ptx = config, learner, critic, ptx
        self._version = version
        self._lr = learning_rate(version, total_steps=config.run.steps, settings=config.trainer)
        self._tally = StepTally()

    def run(
        self, batch: PolicyBatch, updates: Sequence[Sequence[MicroBatch]], *, scores: Scores, plan: StepPlan
    ) -> StepTally:
        """Run all updates; one in which no token trains is skipped; collective.

        Args:
            batch: The shard.
            updates: The micro-batches of each update.
            scores: Logprobs and values before the updates.
            plan: What the updates have in common.
        """
        # A critic that knows nothing yet would make noise of the rewards.
        trains_policy = self._critic is None or self._version >= self._config.critic.warmup_steps
        for number, update in enumerate(updates):
            if plan.is_empty[number]:
                self._tally.add(step_skipped=1)
                continue
            if trains_policy:
                loss_of = PolicyUpdateLoss(
                    batch,
                    model=self._learner.model,
                    scores=scores,
                    plan=plan,
                    is_first=number == 0,
                    config=self._config,
                )
                self._update_policy(loss_of, update, batch=batch, number=number)
            if self._critic is not None:
                self._update_critic(self._critic, update, batch=batch, scores=scores, plan=plan)
        return self._tally

    def _update_policy(
        self, loss_of: PolicyUpdateLoss, update: Sequence[MicroBatch], *, batch: PolicyBatch, number: int
    ) -> None:
        shares = [partial(loss_of, part) for part in update]
        ptx = None
        if self._ptx is not None:
            ptx = self._ptx.update_loss(self._learner.model, version=self._version, minibatch=number)
            shares += [partial(ptx, part) for part in ptx.parts]
        outcome = self._learner.update(shares, lr=self._lr)
        self._tally.add(behav_prox_max_abs_diff_age0=loss_of.max_age0_diff())
        if not outcome.applied:
            self._tally.add(step_skipped=1)
            return
        tokens_T = torch.cat([part.tokens_T for part in update])
        self._tally.add_tokens(batch.ages_T[tokens_T][batch.loss_mask_T[tokens_T]].tolist())
        self._tally.add(policy_updates=1, grad_norm=outcome.grad_norm, **loss_of.sums())
        if ptx is not None:
            self._tally.add(ptx_updates=1, ptx_loss=ptx.sum())

    def _update_critic(
        self, critic: Critic, update: Sequence[MicroBatch], *, batch: PolicyBatch, scores: Scores, plan: StepPlan
    ) -> None:
        assert scores.values_T is not None
        assert plan.advantages.targets_T is not None
        share = critic.update(
            update,
            old_values_T=scores.values_T,
            targets_T=plan.advantages.targets_T,
            loss_mask_T=batch.loss_mask_T,
            token_weights_T=plan.token_weights_T,
            version=self._version,
        )
        if share is None:
            self._tally.add(step_skipped=1)
        else:
            self._tally.add(critic_updates=1, value_loss=share)
