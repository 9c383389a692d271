"""The trainer's side of a publication: gather the parameters once, send them to every engine.

Each trainer rank has one `WeightPublisher`; all ranks call `publish` together, because gathering a sharded
parameter is a collective. Which transport is in use is known here and nowhere else in the trainer.
"""

import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from vllm.distributed.weight_transfer import factory
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource, materialize_full_tensor

from areal_lite.weights.gloo import GlooTrainerInitInfo
from areal_lite.weights.plugin import register

__all__ = ["WeightPublisher"]


class CastSource(WeightSource):
    """A model's parameters in the engines' dtype, gathered from all ranks one by one."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._model, self._dtype = model, dtype

    def metadata(self) -> list[ParamMeta]:
        """Names and full shapes; gathers nothing."""
        return [ParamMeta(name, self._dtype, tuple(p.shape)) for name, p in self._model.named_parameters()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather parameter after parameter: a collective."""
        for name, parameter in self._model.named_parameters():
            yield name, materialize_full_tensor(parameter.detach()).to(self._dtype)


class SnapshotSource(WeightSource):
    """A source whose parameters were gathered once, so that several senders can read it at the same time."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._tensors: list[tuple[str, torch.Tensor]] = []

    def gather(self) -> None:
        """Take the present parameters: a collective."""
        self._tensors = list(self._source)

    def metadata(self) -> list[ParamMeta]:
        """Names and full shapes."""
        return list(self._source.metadata())

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Read the snapshot; no collective."""
        return iter(self._tensors)


class WeightPublisher:
    """Sends the trainer's parameters to all connected engines.

    Over `gloo` trainer rank 0 forms one pair with each engine, so that a dead engine touches nobody else. Over
    `nccl` and `ipc` there is one group of rank 0 and all engines, as vLLM ships it.
    """

    def __init__(
        self, model: nn.Module, *, transport: str, dtype: torch.dtype, rank: int, host: str, timeout_s: float
    ) -> None:
        register()
        self._transport, self._rank, self._host, self._timeout_s = transport, rank, host, timeout_s
        self._source = CastSource(model, dtype)
        self._snapshot = SnapshotSource(self._source)
        self._senders: dict[str, Any] = {}

    def connect(self, clients: Mapping[str, Any], *, group_client: Any, num_engine_ranks: int) -> dict[str, str | None]:
        """Make exactly these engines the receivers.

        Args:
            clients: A weight-sync client per engine name.
            group_client: One client that speaks to all of them.
            num_engine_ranks: Processes that hold a model, over all engines.

        Returns:
            Per engine None, or why it could not be connected.
        """
        if self._transport != "gloo":
            for sender in self._senders.values():
                sender.shutdown()
            self._senders = {"": self._connect_group(group_client, num_engine_ranks)}
            self._members = list(clients)
            return dict.fromkeys(clients)
        failures: dict[str, str | None] = dict.fromkeys(clients)
        self._senders = {name: sender for name, sender in self._senders.items() if name in clients}
        for name, client in clients.items():
            if self._rank == 0 and name not in self._senders:
                try:
                    self._senders[name] = self._connect_pair(client)
                except Exception as error:
                    failures[name] = f"{type(error).__name__}: {error}"
        return failures

    def publish(self) -> dict[str, str | None]:
        """Send the present parameters to all engines; every rank calls this.

        Over `gloo` the engines only stage them, and may generate meanwhile; over `nccl` and `ipc` they load them.

        Returns:
            Per engine None, or why it failed (on rank 0; other ranks return nothing).
        """
        if self._transport != "gloo":
            return dict.fromkeys(self._members, _failure(self._senders[""].send_weights))
        self._snapshot.gather()
        if not self._senders:
            return {}
        with ThreadPoolExecutor(max_workers=len(self._senders)) as pool:
            failures = pool.map(_failure, [sender.stage_weights for sender in self._senders.values()])
            return dict(zip(self._senders, failures, strict=True))

    def _connect_pair(self, client: Any) -> Any:
        info = GlooTrainerInitInfo(host=self._host, timeout_s=self._timeout_s, rank=self._rank)
        return factory.WeightTransferTrainerFactory.trainer_init(info, client=client, source=self._snapshot)

    def _connect_group(self, client: Any, num_engine_ranks: int) -> Any:
        if self._transport == "nccl":
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            info = NCCLTrainerInitInfo(
                master_address=self._host, master_port=_free_port(), world_size=1 + num_engine_ranks, rank=self._rank
            )
        else:
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            info = IPCTrainerInitInfo(rank=self._rank)
        return factory.WeightTransferTrainerFactory.trainer_init(info, client=client, source=self._source)


def _failure(send: Callable[[], None]) -> str | None:
    """Send to one receiver; its failure is data, so that the other receivers go on."""
    try:
        send()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
