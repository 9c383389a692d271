"""Run as a program: how far the resident memory of a trainer rank grows over that of a process that has none.

    python resident.py FOLDER WIDTH ROWS     trains steps of ROWS rows of WIDTH tokens on the model in FOLDER

Prints bytes.
"""

import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from train_builders import make_config, make_shard, save_tiny_model

from areal_lite.config.recipe import Config
from areal_lite.train.trainer import Trainer
from areal_lite.types import Row, Sample, Shard, StopReason, VersionSpan


def recipe(*, width: int, rows: int) -> Config:
    """Two micro-batches, so that gradients of one wait for the other."""
    return make_config(
        groups=1,
        samples=2 * rows,
        model={"max_context": width},
        rollout={"max_new_tokens": width - 1},
        trainer={"minibatches": 1, "micro_batch_tokens": rows * width},
    )


def shard(version: int, *, width: int, rows: int) -> Shard:
    """Prompts of one token, completions as long as they may be."""
    sample = Sample(
        token_ids=np.full(width - 1, 3, np.int32),
        logprobs=np.full(width - 1, -1.0, np.float32),
        spans=(VersionSpan(version=version, start=0, end=width - 1),),
        stop_reason=StopReason.LENGTH,
    )
    made = [
        Row(group_index=0, sample_index=index, minibatch=0, prompt_token_ids=(3,), sample=sample)
        for index in range(2 * rows)
    ]
    return make_shard(made, rewards=np.arange(2 * rows)[None] % 2, version=version)


def train(folder: str, *, width: int, rows: int) -> Trainer:
    """Train two steps, and look at the second."""
    trainer = Trainer(recipe(width=width, rows=rows), model_folder=folder, rank=0)
    for version in range(2):
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak
        trainer.train_step(shard(version, width=width, rows=rows))
    return trainer


def status(name: str) -> int:
    """Read bytes from what Linux says of this process."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as tiny:
        train(save_tiny_model(Path(tiny)), width=8, rows=1)  # loads what every step loads
    before = status("VmRSS")
    kept = train(sys.argv[1], width=int(sys.argv[2]), rows=int(sys.argv[3]))
    print(status("VmHWM") - before)
