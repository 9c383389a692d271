"""The trainer's side of a publication: gather the parameters once, send them to every engine.

Each trainer rank has one `WeightPublisher`; all ranks call `publish` together, because gathering a sharded parameter is
a collective. No other file of the trainer knows which transport is in use.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from areal_lite.errors import HandoverError
from areal_lite.train.gathers import whole_parameters
from areal_lite.train.lora import model_parameters, plain_name, saved_buffers
from areal_lite.weights.families import bit_squares
from areal_lite.weights.gloo import GlooSender, GlooUpdateInfo, packed

_COUNTER = slice(11, 13)
"""The place of the receivers' counter (file and offset) in the arguments of PyTorch's `rebuild_cuda_tensor`."""


class CastSource(WeightSource):
    """A model's parameters in the engines' dtype, adapters merged into them, gathered from all ranks layer by layer.

    The buffers that a checkpoint holds come first, in their own dtypes: vLLM has parameters for some of them, such as a
    router's bias.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, *, everywhere: bool = False) -> None:
        """Gather nothing yet.

        Args:
            everywhere: Every rank yields the parameters; otherwise rank 0 alone, and the others help to gather.
        """
        self._model, self._dtype, self._everywhere = model, dtype, everywhere

    def metadata(self) -> list[ParamMeta]:
        """Return names, dtypes and full shapes; gathers nothing."""
        buffers = [ParamMeta(name, buffer.dtype, tuple(buffer.shape)) for name, buffer in saved_buffers(self._model)]
        parameters = [ParamMeta(name, self._dtype, tuple(p.shape)) for name, p, _ in model_parameters(self._model)]
        return buffers + parameters

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather layer by layer: a collective."""
        parameters = whole_parameters(self._model, self._dtype, everywhere=self._everywhere)
        self._pairs: Iterator[tuple[str, torch.Tensor]] = chain(saved_buffers(self._model), parameters)
        return self._pairs

    @contextmanager
    def whole(self) -> Iterator[None]:
        """At the end gather the rest, if a sender stopped early: the other ranks do not know that it did."""
        iter(self)
        try:
            yield
        finally:
            for _ in self._pairs:
                pass


class _PatientClient:
    """Keeps the first failure of an `ipc` transfer until the transfer is over, and makes no further calls.

    The trainer's ranks wait for each other between the calls; a rank that raised would block the others forever.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self.failures: Mapping[str, str] = {}
        """Reasons, not the error: its traceback would keep the copies that were sent alive."""
        self._handles: list[dict[str, tuple[Any, ...]]] = []

    def __getattr__(self, method: str) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            if method == "update_weights":
                self._handles = arguments[0]["ipc_handles"]
            if not self.failures:
                try:
                    getattr(self._client, method)(*arguments)
                except HandoverError as error:
                    if not error.engines:
                        raise
                    self.failures = error.engines
            if method == "finish_weight_update" and self.failures:
                self._release()

        return call

    def _release(self) -> None:
        """Mark copies as received: PyTorch keeps each until its receiver does that, and a dead one never will."""
        for handle in self._handles:
            for arguments in handle.values():
                with suppress(Exception):  # the engine that was alive has received it, and the counter is gone
                    torch.UntypedStorage._release_ipc_counter_cuda(*arguments[_COUNTER])


class WeightPublisher:
    """Sends the trainer's parameters to all connected engines.

    Over `gloo` trainer rank 0 forms one pair with each engine, so that a dead engine affects no other. Over `nccl` and
    `ipc` rank 0 and all engines form one group, and a new one when an engine fails.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        transport: str,
        dtype: torch.dtype,
        rank: int,
        host: str,
        ports: range,
        timeout_s: float,
    ) -> None:
        """Connect no engine yet.

        Args:
            host: Address of this machine at which engines find rank 0.
            ports: Rank 0 listens on some of them.
        """
        self._model, self._transport, self._rank = model, transport, rank
        self._place: dict[str, Any] = {"host": host, "ports": ports, "timeout_s": timeout_s}
        # Over ipc each rank hands the weights to the engine on its own GPU.
        self._source = CastSource(model, dtype, everywhere=transport == "ipc")
        self._senders: dict[str, Any] = {}
        self.mb_per_s: dict[str, float] = {}
        """On rank 0, the speed at which each engine received the last publication; over `gloo` alone, a pair each."""

    def connect(
        self, clients: Mapping[str, Any], *, kept: Collection[str] = (), group_client: Any, num_engine_ranks: int
    ) -> dict[str, str | None]:
        """Make exactly these engines the receivers.

        Args:
            clients: A weight-sync client per engine name.
            kept: Those that stay connected; a restarted engine has its predecessor's name, and is not among them.
            group_client: One client for all of them.
            num_engine_ranks: Processes that hold a model, over all engines.

        Returns:
            Per engine None, or why it could not be connected; in a group, none is connected then.
        """
        failures: dict[str, str | None] = dict.fromkeys(clients)
        if self._transport != "gloo":
            for sender in self._senders.values():
                sender.shutdown()
            self._members = list(clients)
            try:
                self._senders = {"": self._connect_group(group_client, num_engine_ranks)}
            except HandoverError as error:
                failures |= error.engines or dict.fromkeys(clients, str(error))
            return failures
        self._senders = {name: sender for name, sender in self._senders.items() if name in kept}
        new = {name: client for name, client in clients.items() if self._rank == 0 and name not in self._senders}
        ranks = num_engine_ranks // max(1, len(clients))
        with ThreadPoolExecutor(max_workers=max(1, len(new))) as pool:
            joining = {
                name: pool.submit(GlooSender, client, engine_ranks=ranks, **self._place) for name, client in new.items()
            }
        for name, pair in joining.items():
            try:
                self._senders[name] = pair.result()
            except Exception as error:
                failures[name] = f"{type(error).__name__}: {error}"
        return failures

    def publish(self) -> dict[str, str | None]:
        """Send the current parameters to all engines; every rank calls this.

        Over `gloo` the engines only stage them, and may generate meanwhile; over `nccl` and `ipc` they load them.

        Returns:
            Per engine None, or why it failed (meaningful on rank 0 only). If one of a group failed, none of the group
            has the weights whole.
        """
        if self._transport != "gloo":
            failures: dict[str, str | None] = dict.fromkeys(self._members)
            with self._source.whole():
                try:
                    (sender := self._senders[""]).send_weights()
                    if isinstance(sender.client, _PatientClient):
                        failures |= sender.client.failures
                except HandoverError as error:
                    failures |= error.engines or dict.fromkeys(self._members, str(error))
            return failures
        if self._rank != 0:
            for _ in self._source:  # rank 0 gathers
                pass
            return {}
        update, senders = packed(self._source), self._senders
        with ThreadPoolExecutor(max_workers=max(1, len(senders))) as pool:
            stages = {name: pool.submit(_timed, sender, *update) for name, sender in senders.items()}
        results = {name: stage.result() for name, stage in stages.items()}
        size_mb = len(update[1]) / 1e6
        self.mb_per_s = {name: size_mb / seconds for name, (failure, seconds) in results.items() if failure is None}
        return {name: failure for name, (failure, _) in results.items()}

    def squares(self) -> dict[str, int]:
        """Return, on rank 0, the fingerprint of each tensor as it is sent (`families.py`); every rank calls this."""
        sums = {name: int(bit_squares(value)) for name, value in self._source}
        names = {id(parameter): name for name, parameter, _ in model_parameters(self._model)}
        # A tied output layer is not sent, but the engine may keep a copy of it.
        tied = [(name, names.get(id(value))) for name, value in self._model.named_parameters(remove_duplicate=False)]
        return sums | {plain_name(name): sums[first] for name, first in tied if first in sums}

    def _connect_group(self, client: Any, num_engine_ranks: int) -> Any:
        if self._transport == "nccl":
            from areal_lite.weights.nccl import NcclSender

            is_sender = self._rank == 0
            return NcclSender(client, self._source, is_sender=is_sender, engine_ranks=num_engine_ranks, **self._place)
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

        own = IPCTrainerInitInfo(rank=self._rank)
        sender = IPCTrainerWeightTransferEngine.trainer_init(own, client=client, source=self._source)
        sender.client = _PatientClient(client)
        return sender


def _timed(sender: GlooSender, info: GlooUpdateInfo, flat: torch.Tensor) -> tuple[str | None, float]:
    """Send to one receiver; returns its failure, so that the other receivers are served, and the seconds."""
    begun = time.monotonic()
    try:
        sender.stage(info, flat)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begun
    return None, time.monotonic() - begun
