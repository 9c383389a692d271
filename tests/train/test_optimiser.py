"""The optimiser: what decays, and a state that was saved with other groups."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from train_builders import make_config
from transformers import AutoModelForCausalLM

from areal_lite.config.sections import TrainerConfig
from areal_lite.train.checkpoint import load_checkpoint, take_snapshot
from areal_lite.train.optimiser import Learner

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Experts(nn.Module):
    """A norm, a layer with a bias, and experts whose weights and biases are stacked, as gpt-oss has them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(4), nn.Linear(4, 3)
        self.down_proj = nn.Parameter(torch.ones(3, 4, 4))
        self.down_proj_bias = nn.Parameter(torch.ones(3, 4))


def apply_no_gradient(learner: Learner) -> None:
    """Take a step whose gradients are all 0: what moves then has decayed."""
    loss = sum(0.0 * parameter.sum() for parameter in learner.model.parameters())
    assert learner.update([lambda: (loss, {})], step=0).applied


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    """AdamW multiplies by `1 - lr * weight_decay` (arXiv 1711.05101, algorithm 2): 1 - 0.1 * 0.5 = 0.95.

    Seen failing with everything decaying, and with the experts' biases told by their number of dimensions alone.
    """
    model = Experts()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    apply_no_gradient(Learner(model, settings=TrainerConfig(lr=0.1, weight_decay=0.5), total_steps=1))
    decayed = {"router.weight", "down_proj"}
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.detach(), before[name] * (0.95 if name in decayed else 1.0), msg=name)


def test_a_checkpoint_with_one_group_for_everything_still_loads(model_folder: str, tmp_path: Path) -> None:
    """Its moments come back by the parameters' names; which of them decay, and how much, is the recipe's.

    Seen failing with the groups in the checkpoint, as before: `Missing key in checkpoint state_dict`.
    """
    old, new = (
        Learner(
            AutoModelForCausalLM.from_pretrained(model_folder),
            settings=make_config(trainer={"weight_decay": decay, "lr": 0.1}).trainer,
            total_steps=1,
        )
        for decay in (0.0, 0.5)
    )
    for number, moments in enumerate(old.optimizer.state.values()):
        moments["exp_avg"].fill_(number + 1)
    take_snapshot(old, version=0, rank=0, limit=0.1)(tmp_path)
    groups_too = get_optimizer_state_dict(old.model, old.optimizer)
    assert len(groups_too["param_groups"]) == 1
    save({"model": get_model_state_dict(old.model), "optimizer": groups_too}, checkpoint_id=tmp_path)
    load_checkpoint(tmp_path, new, rank=0, limit=0.1)
    for name, parameter in new.model.named_parameters():
        expected = old.optimizer.state[old.model.get_parameter(name)]
        torch.testing.assert_close(new.optimizer.state[parameter], expected, msg=name)
    assert sorted(group["weight_decay"] for group in new.optimizer.param_groups) == [0.0, 0.5]
