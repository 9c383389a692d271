"""Parameters gathered from real ranks (processes, gloo): in how many batches, in which dtype, to whom, what is held."""

import json
import weakref
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from train_builders import make_config, save_tiny_model
from transformers import AutoModelForCausalLM

from areal_lite.train.gathers import whole_parameters
from areal_lite.train.model import load_model

pytestmark = pytest.mark.slow

RANKS = LAYERS = 4
TIED = ("tied", "untied")
CASES = list(product(TIED, ("float32", "bfloat16"), (False, True)))


class Allocated(TorchDispatchMode):
    """Counts the bytes of storages made since, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known = weakref.WeakSet[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and func.namespace == "aten" and not func.is_view:
            storage = result.untyped_storage()
            if storage not in self._known:
                self._known.add(storage)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._free, storage.nbytes())
        return result

    def _free(self, size_bytes: int) -> None:
        self.now -= size_bytes


def gather(rank: int, world_size: int, folders: dict[str, str], out: str) -> None:
    """Gather in each way, dropping every parameter at once, and write down what happened."""
    send, found = dist.batch_isend_irecv, {}
    for tied, dtype_name, everywhere in CASES:
        dtype, folder = getattr(torch, dtype_name), folders[tied]
        config = make_config(trainer={"ranks": world_size}, model={"compute_dtype": dtype_name})
        model = load_model(folder, config)
        expected = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
        batches: list[list[tuple[str, int]]] = []

        def note(batch: list[Any], batches: list[list[tuple[str, int]]] = batches) -> Any:
            batches.append([(str(one.tensor.dtype), one.tensor.nbytes * (one.op is dist.isend)) for one in batch])
            return send(batch)

        dist.batch_isend_irecv = note
        names, equal = [], True
        with Allocated() as allocated:
            for name, value in whole_parameters(model, dtype, everywhere=everywhere):
                names.append(name)
                equal &= value.dtype == dtype and bool((value == expected[name].to(dtype)).all())
        assert equal
        assert names == ([] if rank and not everywhere else [name for name, _ in model.named_parameters()])
        messages = [message for batch in batches for message in batch]
        found[f"{tied} {dtype_name} {everywhere}"] = {
            "groups": sum(isinstance(module, FSDPModule) for module in model.modules()),
            "batches": len(batches),
            "dtypes": sorted({name for name, _ in messages}),
            "sent": sum(size for _, size in messages),
            "held": allocated.most,
        }
    (Path(out) / f"{rank}.json").write_text(json.dumps(found))


def test_each_group_is_gathered_once_in_the_dtype_of_the_engines(tmp_path: Path) -> None:
    """One batch per FSDP group; what rank 0 lacks is sent to it once, and to the others only where all need it.

    Rank 0 holds one layer and what waits of the model's own group, the others pieces. Seen failing with a batch per
    parameter, with pieces cast after they arrive, with pieces sent to every rank, and with all groups gathered first.
    """
    folders = {
        tied: save_tiny_model(tmp_path / tied, tie_embeddings=tied == "tied", num_layers=LAYERS) for tied in TIED
    }
    run_ranks(gather, folders, str(tmp_path), world_size=RANKS)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    for tied, dtype, everywhere in CASES:
        model = AutoModelForCausalLM.from_pretrained(folders[tied])
        found = [rank[f"{tied} {dtype} {everywhere}"] for rank in ranks]
        itemsize = getattr(torch, dtype).itemsize
        total = sum(parameter.numel() for parameter in model.parameters()) * itemsize
        # Pieces of ceil(rows / ranks) rows; rank 0's own stay where they are.
        own = sum(-(-len(one) // RANKS) * one[0].numel() for one in model.parameters()) * itemsize
        assert [one["batches"] for one in found] == [LAYERS + 1] * RANKS == [one["groups"] for one in found]
        assert {name for one in found for name in one["dtypes"]} == {f"torch.{dtype}"}
        assert sum(one["sent"] for one in found) == ((RANKS - 1) * total if everywhere else total - own)
        if not everywhere:
            layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters()) * itemsize
            held = [one["held"] for one in found]
            # The test's own comparisons take up to 8 KiB.
            assert held[0] <= layer + (total - LAYERS * layer) + 8 * 1024
            assert max(held[1:]) <= layer / 2
