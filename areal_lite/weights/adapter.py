"""An adapter on its way into an engine: written where vLLM loads it from, and compared with what vLLM then has.

An adapter that never arrived would look like staleness: samples of weights that do not learn. So what an engine
computes with is compared in every hand-over, `gloo.py` having compared what came with what was sent.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from areal_lite.errors import HandoverError
from areal_lite.train.lora import bit_sum


class StagedAdapter:
    """An adapter in a folder of the node's; vLLM loads it in the pause, then `swap` is called."""

    def __init__(
        self, model: nn.Module, weights: dict[str, torch.Tensor], *, folder: Path, settings: dict[str, Any]
    ) -> None:
        """Write it.

        Args:
            model: A vLLM model with room for one adapter.
            weights: By the names of peft's files.
            folder: Exists; what is in it is in nobody's use.
            settings: Of peft's `adapter_config.json`; `lora_alpha` and `r` among them.
        """
        self._model = model
        save_file(weights, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        scale = settings["lora_alpha"] / settings["r"]
        # vLLM scales B as it loads it.
        self._sums = [
            sum(int(bit_sum(value * factor)) for name, value in weights.items() if f".{letter}." in name)
            for letter, factor in (("lora_A", 1.0), ("lora_B", scale))
        ]

    def swap(self) -> None:
        """Compare.

        Raises:
            HandoverError: The engine computes with something else.
        """
        layers: list[Any] = [layer for layer in self._model.modules() if hasattr(layer, "lora_a_stacked")]
        loaded = [
            sum(int(bit_sum(value)) for layer in layers for value in getattr(layer, stack))
            for stack in ("lora_a_stacked", "lora_b_stacked")
        ]
        if loaded != self._sums:
            raise HandoverError(
                f"the engine must have the adapter that was sent, checksums of A and B {self._sums}, it has {loaded}: "
                "set trainer.lora.handover=merged, and tell us the model"
            )
