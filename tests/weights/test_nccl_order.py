"""The order in which trainer ranks gather and send over NCCL: real FSDP ranks and vLLM's classes, without a GPU.

What each rank asks for is written down by `nccl_stand_in.py`, whose streams do everything at once: this shows the order
of the calls, and cannot show a hang.
"""

import json
from pathlib import Path
from typing import Any

import nccl_stand_in
import pytest
import torch
from nccl_stand_in import Operation, TrainerOperations, stand_in
from rank_processes import run_ranks
from test_gloo_transport import TinyModel, make_publisher, same, weights_of
from test_nccl_transport import Run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

pytestmark = pytest.mark.slow


def publish(rank: int, world_size: int, out: str) -> None:
    """Publish twice to two engines, which are threads of rank 0, and write down what this rank asked for."""
    model: Any = TinyModel(seed=1)
    mesh = init_device_mesh("cpu", (world_size,))
    for module in (model.linear, model):
        fully_shard(module, mesh=mesh)
    with pytest.MonkeyPatch.context() as monkeypatch, stand_in(), TrainerOperations():
        if rank == 0:
            run = Run(monkeypatch, "ab", trainer=model)
            for _ in range(2):
                run.hand_over()
            expected = {name: value + 1 + 1 for name, value in weights_of(TinyModel(seed=1)).items()}
            assert all(same(weights_of(engine.model), expected) for engine in run.engines.values())
        else:
            publisher = make_publisher(model, transport="nccl", rank=rank)
            publisher.connect({"a": None, "b": None}, group_client=None, num_engine_ranks=2)
            for _ in range(2):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(1.0)
                publisher.publish()
    (Path(out) / f"{rank}.json").write_text(json.dumps(nccl_stand_in.operations))


@pytest.mark.parametrize("world_size", [2, 3])
def test_gathers_are_complete_before_they_are_sent_from_another_stream(tmp_path: Path, world_size: int) -> None:
    """The trainer's operations and the broadcasts to the engines are never on one stream.

    Between a gather and the next broadcast rank 0 waits for the stream of the gather. Seen failing with vLLM's sender,
    which gathers on the streams that it sends from, and without that wait.
    """
    run_ranks(publish, str(tmp_path), world_size=world_size)
    logs = [
        [Operation(*each) for each in json.loads((tmp_path / f"{rank}.json").read_text())] for rank in range(world_size)
    ]
    for rank, log in enumerate(logs):
        gathers = [one for one in log if one.group == "trainer"]
        assert {(one.rank, one.stream) for one in gathers} == {(rank, "default")}
    sender = [one for one in logs[0] if one.group != "transfer" or one.rank == 0]
    broadcasts = [number for number, one in enumerate(sender) if one.group == "transfer"]
    assert len(broadcasts) == 2 * len(weights_of(TinyModel(seed=1)))
    assert {sender[number].stream for number in broadcasts} == {"side"}
    for number in broadcasts:
        since = sender[number - 1 :: -1]
        last_gather = next(place for place, one in enumerate(since) if one.group == "trainer")
        assert (-1, "", "default", "synchronize") in since[:last_gather]
