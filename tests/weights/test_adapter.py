"""An adapter over gloo: written for vLLM, and what an engine then has compared with what was sent; no engine here."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_gloo_transport import FakeSource, LocalClient, make_engine, make_sender
from torch import nn

from areal_lite.errors import HandoverError

NAME = "base_model.model.layers.0.q_proj.lora_{}.weight"


class AdaptedLayer(nn.Linear):
    """Stands for vLLM's: room for rank 4, in which an adapter of rank 2 leaves zeros."""

    lora_a_stacked = (torch.zeros(1, 1, 4, 8),)
    lora_b_stacked = (torch.zeros(1, 1, 6, 4),)

    def load(self, folder: Path, *, scale: float) -> None:
        weights = load_file(folder / "adapter_model.safetensors")
        self.lora_a_stacked[0][0, 0, :2] = weights[NAME.format("A")]
        self.lora_b_stacked[0][0, 0, :, :2] = weights[NAME.format("B")] * scale


def test_an_adapter_is_written_and_what_is_loaded_is_compared(tmp_path: Path) -> None:
    """With alpha 5 and rank 2, B counts 2.5 times. Seen failing with the comparison left out."""
    layer, a, b = AdaptedLayer(8, 6), torch.randn(2, 8), torch.full((6, 2), -0.3)
    source: Any = FakeSource({NAME.format("A"): a, NAME.format("B"): b})
    source.adapter = {"peft_type": "LORA", "r": 2, "lora_alpha": 5.0, "target_modules": ["q_proj"]}
    client = LocalClient(make_engine(layer), damage=lambda info: info | {"folder": str(tmp_path)})
    sender = make_sender(client, source)
    for scale in (2.5, None, 1.0):
        sender.stage_weights()
        if scale is not None:
            layer.load(tmp_path, scale=scale)
        if scale == 2.5:
            client.finish_weight_update()
            a.add_(1.0)  # the next one, which is never loaded, then loaded wrongly
        else:
            with pytest.raises(HandoverError, match="must have the adapter that was sent"):
                client.finish_weight_update()
