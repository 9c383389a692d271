"""The CPU transport: a vLLM weight-transfer engine over gloo, one engine per group.

Trainer rank 0 and the processes of one engine form a group on a TCPStore of their own, so that an engine that dies
affects no other. The parameters travel as one flat run of bytes. The engine stages them in a thread while it keeps
generating:

    trainer: announce names, shapes, dtypes, checksum → broadcast → wait for the acknowledgement
    engine:  compare with the first set → receive → compare the checksum → prepare (`prepared.py`) → acknowledge

Only `finish_weight_update`, which the hand-over calls in the pause, changes the model; after a broken transfer the old
weights are whole. Only vLLM and the trainer's publisher import this module (it is registered by `plugin.py`).
"""

import math
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import AllreduceOptions, ProcessGroupGloo, ReduceOp, TCPStore  # type: ignore[attr-defined]
from vllm.distributed.weight_transfer.base import (
    VLLMWeightSyncClient,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from areal_lite.errors import HandoverError
from areal_lite.network import address_towards
from areal_lite.train.distributed import open_store

Parameter = tuple[str, str, list[int]]
"""Name, dtype and shape."""
_BUCKET_BYTES = 256 * 2**20
"""Largest single broadcast; gloo's own limit is 2 GiB."""


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """Where the engine finds the trainer."""

    host: str
    port: int
    timeout_s: float
    engine_ranks: int = 1
    """processes that hold a part of the engine's model"""


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """What the trainer is about to send, in order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    checksum: int

    def parameters(self) -> list[Parameter]:
        """One entry per parameter, in the order sent."""
        return list(zip(self.names, self.dtype_names, self.shapes, strict=True))


def _join(store: TCPStore, rank: int, info: GlooInitInfo) -> ProcessGroupGloo:
    """Join a group from the address on the route to its store: gloo would take the host name's, often 127.0.1.1."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing from torch's stubs
    options._devices = [ProcessGroupGloo.create_device(hostname=address_towards(store.host))]
    options._timeout = timedelta(seconds=info.timeout_s)
    return ProcessGroupGloo(store, rank, 1 + info.engine_ranks, options)


def _size_bytes(parameter: Parameter) -> int:
    _, dtype, shape = parameter
    return int(getattr(torch, dtype).itemsize * math.prod(shape))


def _broadcast(group: ProcessGroupGloo, flat: torch.Tensor) -> None:
    """Send (rank 0) or receive a flat uint8 tensor; the group's timeout bounds each bucket."""
    for bucket in flat.split(_BUCKET_BYTES):
        group.broadcast(bucket, root=0).wait()  # type: ignore[attr-defined]  # missing from torch's stubs


def _checksum(flat: torch.Tensor) -> int:
    return zlib.crc32(flat.numpy().data)


def _acknowledge(group: ProcessGroupGloo, staged: bool = True) -> bool:
    """Exchange whether this process of the engine holds everything (rank 0 always does); returns whether all do."""
    answer = torch.tensor([staged], dtype=torch.uint8)
    options = AllreduceOptions()
    options.reduceOp = ReduceOp.MIN  # type: ignore[assignment]  # as torch has it
    group.allreduce([answer], options).wait()  # type: ignore[attr-defined]  # missing from torch's stubs
    return bool(answer.item())


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """The engine's side, created by vLLM inside the process that holds the model."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group: ProcessGroupGloo | None = None
        self._receiving: Future[None] | None = None
        self._load: Callable[[], None] | None = None
        """Loads what was received: swaps prepared weights in or, if the model is not plain, reloads it."""
        self._known: list[Parameter] | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Form a new group with the trainer; an earlier one is dropped.

        Raises:
            HandoverError: Layers of the model would silently be loaded wrongly.
        """
        from areal_lite.weights.prepared import is_plain  # here and below: a trainer does not need it, and it is slow

        if lost := [] if is_plain(self.model) else _packed_once(self.model):
            raise HandoverError(
                f"an engine's layers must take new weights, but vLLM packs the experts of {len(lost)} layers at the "
                f"start and never again: {lost[:3]}. Fix: remove what quantises them, or use a GPU"
            )
        timeout = timedelta(seconds=init_info.timeout_s)
        store = TCPStore(
            init_info.host, init_info.port, world_size=1 + init_info.engine_ranks, is_master=False, timeout=timeout
        )
        self._group = _join(store, 1 + self.parallel_config.rank, init_info)
        self._receiving = None

    def start_weight_update(self) -> None:
        """Open an update; the model stays unchanged until everything has arrived."""
        self._load, self._receiving = None, None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Start to stage one full set of parameters, and return at once; a second call waits for the first.

        (The base class would synchronise an accelerator.)

        Raises:
            HandoverError: The set differs from the earlier ones or, in the second call, bytes were damaged.
        """
        if self._receiving is None:
            self.receive_weights(self.parse_update_info(update_info))
        else:
            self._receiving.result()

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Compare the announced set with the earlier one; receive, check and stage it in a thread.

        Raises:
            HandoverError: The sets differ.
        """
        if self._group is None:
            raise HandoverError("an update needs a transfer group, got none: call init_transfer_engine first")
        parameters = update_info.parameters()
        if self._known is not None and parameters != self._known:
            raise HandoverError(
                f"the parameters sent differ from those loaded before: {_difference(self._known, parameters)}"
            )
        self._receiving = Future()
        arguments = (self._group, parameters, update_info.checksum, self._receiving)
        threading.Thread(target=self._receive, args=arguments, name="weights", daemon=True).start()

    def _receive(
        self, group: ProcessGroupGloo, parameters: list[Parameter], checksum: int, receiving: Future[None]
    ) -> None:
        """Consumes one broadcast, produces `_load` and the acknowledgement; bounded by the group's timeout."""
        from areal_lite.weights.prepared import PreparedWeights, is_plain

        try:
            flat = torch.empty(sum(map(_size_bytes, parameters)), dtype=torch.uint8)
            _broadcast(group, flat)
            if (got := _checksum(flat)) != checksum:
                raise HandoverError(f"parameters were damaged on the way: checksum {checksum} sent, {got} received")
            weights = list(_unpack(flat, parameters))
            if is_plain(self.model):
                self._load = PreparedWeights(self.model, weights).swap
            else:
                self._load = partial(self._reload, weights)
            self._known = parameters
            receiving.set_result(None)
        except Exception as error:
            receiving.set_exception(error)
        # Last: the trainer's next request to this engine needs the result to be there.
        with suppress(RuntimeError):  # the pair is broken, as the trainer sees too
            _acknowledge(group, staged=receiving.exception() is None)

    def finish_weight_update(self) -> None:
        """Load the staged weights.

        Raises:
            HandoverError: They do not cover the model, or there are none.
        """
        receiving, self._receiving = self._receiving, None
        if receiving is not None:
            receiving.result()
        if self._load is None:
            raise HandoverError("there is nothing to load: no parameters were received in this update")
        load, self._load = self._load, None
        load()

    def shutdown(self) -> None:
        """Drop the group."""
        self._group = None

    def _reload(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Load layer by layer as vLLM does, which takes longer but supports every kind of layer."""
        from vllm.model_executor.model_loader import reload

        from areal_lite.weights.prepared import check_covered

        expected = {name for name, _ in self.model.named_parameters()}
        reload.initialize_layerwise_reload(self.model)
        loaded = self.model.load_weights(weights)
        reload.finalize_layerwise_reload(self.model, self.model_config)
        known, self._known = self._known, None  # a set that is refused does not bind the next one
        check_covered(expected, loaded)
        self._known = known
        _repack_tied_head(self.model)


def _unpack(flat: torch.Tensor, parameters: Sequence[Parameter]) -> Iterable[tuple[str, torch.Tensor]]:
    pieces = flat.split([_size_bytes(parameter) for parameter in parameters])
    for (name, dtype, shape), piece in zip(parameters, pieces, strict=True):
        yield name, piece.view(getattr(torch, dtype)).view(shape)


def _repack_tied_head(model: torch.nn.Module) -> None:
    """Refresh the packed copy that a CPU `lm_head` keeps of a tied embedding (0.09 nats off without)."""
    head = getattr(model, "lm_head", None)
    if getattr(model.config, "tie_word_embeddings", False) and head is not None:
        head.quant_method.process_weights_after_loading(head)


def _packed_once(model: torch.nn.Module) -> list[str]:
    """Return the names of expert layers with a kernel: a reload leaves their weights unpacked (nats off on a CPU)."""
    methods = {name: getattr(layer, "quant_method", None) for name, layer in model.named_modules()}
    return [name for name, method in methods.items() if getattr(method, "moe_kernel", None) is not None]


def _difference(known: list[Parameter], got: list[Parameter]) -> str:
    """Name the first parameters that only one side has, by name, dtype and shape."""
    before, after = (
        {f"{name} {dtype} {tuple(shape)}" for name, dtype, shape in parameters} for parameters in (known, got)
    )
    if before == after:
        return "another order"
    return f"missing {sorted(before - after)[:3]}, new {sorted(after - before)[:3]}"


def packed(weights: Iterable[tuple[str, torch.Tensor]]) -> tuple[GlooUpdateInfo, torch.Tensor]:
    """Copy parameters into one flat run of bytes; returns its announcement and the bytes."""
    info = GlooUpdateInfo(names=[], dtype_names=[], shapes=[], checksum=0)
    parts = list[torch.Tensor]()
    for name, tensor in weights:
        info.names.append(name)
        info.dtype_names.append(str(tensor.dtype).removeprefix("torch."))
        info.shapes.append(list(tensor.shape))
        parts.append(tensor.detach().contiguous().view(-1).view(torch.uint8))
    flat = torch.cat(parts)
    info.checksum = _checksum(flat)
    return info, flat


class GlooSender:
    """The trainer's side: a pair of rank 0 and one engine."""

    def __init__(
        self, client: VLLMWeightSyncClient, *, host: str, ports: range, timeout_s: float, engine_ranks: int = 1
    ) -> None:
        """Form the pair: open a store, let the engine join it, join as rank 0.

        Args:
            client: Of the engine.
            host: Address of this machine at which the engine finds the store.
            ports: The store listens on one of them.
            timeout_s: Seconds that joining, and later each bucket, may take.
            engine_ranks: Processes that hold a part of the engine's model.
        """
        self._client = client
        store = open_store(host, ports, timeout_s=timeout_s)
        info = GlooInitInfo(host=host, port=store.port, engine_ranks=engine_ranks, timeout_s=timeout_s)
        with ThreadPoolExecutor(max_workers=1) as pool:
            joined = pool.submit(client.init_weight_transfer_engine, asdict(info))
            try:
                self._group = _join(store, 0, info)
            finally:
                joined.result()  # the engine's own error is clearer than "timed out" here

    def stage(self, info: GlooUpdateInfo, flat: torch.Tensor) -> None:
        """Open an update and send what `packed` made; returns when the engine holds it, which may generate meanwhile.

        Raises:
            HandoverError: The engine refused the weights, or did not get them; the engine's own error.
        """
        self._client.start_weight_update()
        self._client.update_weights(asdict(info))
        staged = False
        try:
            _broadcast(self._group, flat)
            staged = _acknowledge(self._group)
        finally:
            if not staged:
                self._client.update_weights(asdict(info))  # raises the engine's error, and closes the update
