"""Send each token to the experts that the engine chose for it (`rollout.replay_routes`).

Routers of transformers choose a token's experts by `torch.topk`, and then divide, scale and round, each kind in its own
way. During a replay `topk` returns the recorded experts with the router's own numbers for them, through which gradients
flow as usual. Nothing here names an architecture. Source: arXiv 2510.11370, section 3.

Shape letters: `R` rows and `S` columns of a pass, `N` = R x S tokens, `L` layers, `K` experts of a token.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
)
from transformers.utils.output_capturing import OutputRecorder

from areal_lite.config.offline import OfflineConfig
from areal_lite.config.recipe import Config
from areal_lite.data.tokenizer import build_char_tokenizer
from areal_lite.errors import ConfigError, TrainerError
from areal_lite.train.lora import check_targets
from areal_lite.train.model import attention_of, check_mesh, empty_model
from areal_lite.train.warm_start import build_model


def replay_routes(model: nn.Module) -> None:
    """Make a model's `forward` accept `routes`, [R, S, L, K]; -1 or None = the router chooses.

    The routes of a pass stay until the next one: layers may run again to compute their gradients.
    """
    routes_NLK: Tensor | None = None

    def begin(_model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        nonlocal routes_NLK
        given = named.pop("routes", None)
        routes_NLK = None if given is None else given.flatten(0, 1)
        return arguments, named

    def route(*arguments: Any, choose: Callable[..., Any], layer: int, num_experts: int, **named: Any) -> Any:
        if routes_NLK is None:
            return choose(*arguments, **named)
        with _RecordedTopk(routes_NLK[:, layer].long(), num_experts=num_experts) as recorded:
            result = choose(*arguments, **named)
        if not recorded.was_used:
            raise TrainerError(
                f"replaying routes failed: expected a router of {type(model).__name__} that takes its experts by "
                "torch.topk, got another. Fix: set rollout.replay_routes=false"
            )
        return result

    model.register_forward_pre_hook(begin, with_kwargs=True)
    for layer, router in routers_of(model):
        router.forward = partial(route, choose=router.forward, layer=layer, num_experts=router.num_experts)


class _RecordedTopk(TorchFunctionMode):
    """Make `torch.topk` return the recorded experts, and its own where there are none."""

    def __init__(self, experts_NK: Tensor, *, num_experts: int) -> None:
        super().__init__()
        self._experts_NK, self._num_experts = experts_NK, num_experts
        self.was_used = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        # A router of groups of experts first takes the best groups: that call has another shape.
        if function.__name__ != "topk" or args[0].shape != (len(self._experts_NK), self._num_experts):
            return result
        self.was_used = True
        experts_NK = torch.where(self._experts_NK < 0, result.indices, self._experts_NK)
        return torch.return_types.topk((args[0].gather(-1, experts_NK), experts_NK))


def routers_of(model: nn.Module) -> list[tuple[int, Any]]:
    """Return the routers whose logits transformers can record, each with the number of its decoder layer."""
    known = [(getattr(part, "_can_record_outputs", None) or {}).get("router_logits") for part in model.modules()]
    kinds = tuple({one.target_class for one in known if isinstance(one, OutputRecorder)})
    return [
        (next(int(part) for part in name.split(".") if part.isdigit()), module)
        for name, module in model.named_modules()
        if isinstance(module, kinds) and hasattr(module, "num_experts")
    ]


def check_layers(config: Config | OfflineConfig, folder: Path | None) -> None:
    """Check that a model has the layers that a recipe needs; without a folder, the built-in model.

    Raises:
        ConfigError: transformers has no class for a critic or a reward model of this family, a target of `trainer.lora`
            is none of its layers, it cannot be split over `trainer.mesh`, its attention is not that of
            `trainer.attention`, or there is no router to replay.
    """
    _check_head(config, folder)
    if folder is None:
        model = build_model(config, build_char_tokenizer("0"))
    else:
        model = empty_model(AutoConfig.from_pretrained(folder))
    attention_of(model.config, config.trainer)
    check_mesh(model, config.trainer.mesh)
    if config.trainer.lora is not None:
        check_targets(config.trainer.lora, model)
    if isinstance(config, Config) and config.rollout.replay_routes and not routers_of(model):
        raise ConfigError(
            "rollout.replay_routes needs a mixture of experts with routers that transformers can record, such as "
            f"Qwen3-MoE, got {type(model).__name__}. Fix: set it to false"
        )


def _check_head(config: Config | OfflineConfig, folder: Path | None) -> None:
    """A critic scores tokens, a reward model sequences: transformers has neither for some families."""
    path: str | Path | None = folder
    if config.command == "reward_model":
        known, kind = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, "SequenceClassification"
        user, setting = "command=reward_model", "model.path"
    elif isinstance(config, Config) and config.objective.baseline == "critic":
        known, kind = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, "TokenClassification"
        user, setting, path = "objective.baseline=critic", "critic.path", config.critic.path or folder
    else:
        return
    if path is not None and type(architecture := AutoConfig.from_pretrained(path)) not in known:
        raise ConfigError(
            f"{user} needs a model family with a class ...For{kind} in transformers, got {architecture.model_type} in "
            f"{path}. Fix: set {setting} to a model of another family, such as Qwen3"
        )
