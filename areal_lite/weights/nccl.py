"""The GPU transport: vLLM's NCCL weight transfer, made to survive the death of an engine.

Trainer rank 0 and all engines form one communicator, in which each waits for all others, and NCCL has no time-out. When
the trainer learns that an engine failed, it aborts its side and sets a key in the store where the group was formed;
engines poll that key while they receive, and abort theirs. The remaining ones form a new group (`handover.py`).

Only vLLM and the trainer's publisher import this module (it is registered by `plugin.py`).
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import nccl_common
from vllm.distributed.weight_transfer.base import WeightSource
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)

from areal_lite.errors import HandoverError, TrainerError
from areal_lite.network import listen

BUFFER_BYTES = 256 * 2**20
"""Size of one broadcast; both sides keep two of them on the GPU."""
_POLL_S = 0.1
"""How often a receiving engine checks whether the transfer was aborted."""
_GIVEN_UP = "areal-lite/given-up"
_aborting = threading.Lock()


@dataclass(kw_only=True)
class NcclInitInfo(NCCLWeightTransferInitInfo):
    """Where an engine finds the trainer, and how long all may take to join."""

    timeout_s: float


def _in_thread(call: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Call in a thread, which is abandoned if it never returns, as when NCCL waits for a process that died."""
    future, device = Future[Any](), torch.accelerator.current_device_index()

    def run() -> None:
        try:
            with torch.accelerator.device_index(device):
                future.set_result(call(*arguments))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="nccl-join", daemon=True).start()
    return future


def _abort(group: Any) -> None:
    """Wake all calls that wait in a communicator; later ones do nothing.

    Not the group's own `destroy`, which lets calls through to a communicator that is being freed.
    """
    with _aborting:  # NCCL frees an aborted communicator: only one of two threads may abort it
        if group.disabled:
            return
        group.available, group.disabled = False, True
    with torch.accelerator.device_index(group.device.index):
        group.nccl.ncclCommAbort(group.comm)


class NcclWeightTransferEngine(NCCLWeightTransferEngine):
    """The engine's side, created by vLLM in every process that holds a part of the model."""

    init_info_cls = NcclInitInfo
    _is_open = False

    def init_transfer_engine(self, init_info: NcclInitInfo) -> None:
        """Join the trainer and the other engines; an earlier communicator is dropped.

        Raises:
            HandoverError: A process did not join in time.
        """
        self.shutdown()
        joining = _in_thread(super().init_transfer_engine, init_info)
        try:
            joining.result(init_info.timeout_s)
        except TimeoutError:
            raise HandoverError(
                f"trainer and engines must form their group within weights.timeout_s="
                f"{init_info.timeout_s:g} s, they did not"
            ) from None

    def start_weight_update(self) -> None:
        """Open an update. A broken one is closed first, or its layers would count as loaded."""
        if self._is_open:
            super().finish_weight_update()
        self._is_open = True
        super().start_weight_update()

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receive and load every parameter.

        Raises:
            HandoverError: The transfer was aborted: the weights are not whole until another one succeeds.
        """
        group, done = self.model_update_group, threading.Event()
        watch = threading.Thread(target=_watch, args=(group, done), name="nccl-watch", daemon=True)
        watch.start()
        try:
            super().receive_weights(update_info)
        finally:
            done.set()
            watch.join()
        if group is not None and group.disabled:
            raise HandoverError("the transfer was aborted, as another engine or the trainer failed in it")

    def finish_weight_update(self) -> None:
        """Start to use the loaded layers."""
        super().finish_weight_update()
        self._is_open = False


def _watch(group: Any, done: threading.Event) -> None:
    """Abort once the trainer asks for it, or is gone; `done` ends the watch."""
    while group is not None and not done.wait(_POLL_S):
        given_up = True
        with suppress(Exception):
            given_up = group.group.store.check([_GIVEN_UP])
        if given_up:
            _abort(group)
            return


class NcclSender(NCCLTrainerWeightTransferEngine):
    """The trainer's side: rank 0 and all engines. Other ranks only help to gather the source."""

    def __init__(
        self,
        client: Any,
        source: WeightSource,
        *,
        is_sender: bool,
        host: str,
        ports: range,
        engine_ranks: int,
        timeout_s: float,
    ) -> None:
        """Form the group: the engines join while rank 0 waits in a thread of its own.

        Args:
            client: Calls its attribute `let_go` when an engine failed, before it waits for the others.
            source: What is sent.
            is_sender: Whether this is rank 0.
            host: Address of this machine at which engines find rank 0.
            ports: The group meets at one of them.
            engine_ranks: Processes that hold a model, over all engines.
            timeout_s: Seconds that joining may take.

        Raises:
            HandoverError: Engines did not join; if rank 0 itself failed, its error comes first.
            TrainerError: The engines joined, and rank 0 did not.
        """
        super().__init__(client=client, source=source, is_sender=is_sender, packed_buffer_size_bytes=BUFFER_BYTES)
        if not is_sender:
            return
        client.let_go = self.let_go
        with listen(host, ports) as probe:  # a port that is free now; vLLM takes none that is bound already
            port = int(probe.getsockname()[1])
        place = {"master_address": host, "master_port": port, "world_size": 1 + engine_ranks}
        opening = _in_thread(nccl_common.trainer_init, place)
        wire = {"rank_offset": 1, "packed": True, "packed_buffer_size_bytes": BUFFER_BYTES, "timeout_s": timeout_s}
        try:
            client.init_weight_transfer_engine(place | wire)
        except HandoverError as error:
            # Engines that wait for rank 0 are late, and a dead engine makes rank 0 fail: report both.
            if opening.done() and (own := opening.exception()) is not None:
                why = f"trainer rank 0 could not form the group ({type(own).__name__}: {own}); "
                raise HandoverError(
                    why + str(error), engines={name: why + reason for name, reason in error.engines.items()}
                ) from own
            raise
        try:
            self.model_update_group = opening.result(timeout_s)
        except TimeoutError:
            raise TrainerError(
                "trainer rank 0 must form the group with the engines, which have joined, within "
                f"weights.timeout_s={timeout_s:g} s, it did not: see NCCL's log, or raise it"
            ) from None

    def let_go(self) -> None:
        """Wake every process that waits in a transfer for an engine that failed."""
        if (group := self.model_update_group) is not None:
            with suppress(Exception):
                group.group.store.set(_GIVEN_UP, "")
            _abort(group)

    def _broadcast(self, source: WeightSource, meta: list[Any]) -> None:
        if not self.is_sender:
            super()._broadcast(source, meta)
            return
        try:
            self._send(_chunks(self._checked_iter(source, meta), self.packed_buffer_size_bytes))
        except Exception:
            self.let_go()  # the engines would wait for the rest
            raise

    def _send(self, chunks: Iterator[torch.Tensor]) -> None:
        """Broadcast from a stream of its own, while the next chunk is gathered on the caller's stream.

        vLLM would gather on the streams that it sends from. Here the trainer's collectives never wait for a broadcast,
        and each is complete before its result is sent.
        """
        group, sending = self.model_update_group, torch.cuda.Stream()
        in_flight = deque[torch.Tensor](maxlen=1)
        assert group is not None, "the group is formed before weights are sent"
        for chunk in chunks:
            torch.cuda.current_stream().synchronize()
            sending.synchronize()  # the chunk before has been sent, and its memory is free
            try:
                group.broadcast(chunk, src=0, stream=sending)
            except RuntimeError:
                # NCCL noticed a failure itself. The engines, which have not received everything, report which one.
                self.let_go()
            in_flight.append(chunk)
        sending.synchronize()


def _chunks(parameters: Iterator[tuple[str, torch.Tensor]], size_bytes: int) -> Iterator[torch.Tensor]:
    """Pack parameters as vLLM's engines expect: a chunk ends with the parameter that takes it over `size_bytes`.

    A large parameter that fills a chunk alone is sent from where it is.
    """
    parts = list[torch.Tensor]()
    for _, parameter in parameters:
        parts.append(parameter.contiguous().view(-1).view(torch.uint8))
        if sum(map(len, parts)) > size_bytes:
            yield _packed(parts)
    if parts:
        yield _packed(parts)


def _packed(parts: list[torch.Tensor]) -> torch.Tensor:
    """Join parts into one tensor, and empty the list."""
    packed = parts[0] if len(parts) == 1 else torch.cat(parts)
    parts.clear()
    return packed
