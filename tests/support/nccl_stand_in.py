"""A stand-in for NCCL on machines without GPUs: vLLM's communicator over gloo, under vLLM's real transfer classes.

As with NCCL, a call that waits for a process that died waits forever, and only `ncclCommAbort` wakes it. Ranks can be
made to die or to hang in a transfer.
"""

import contextlib
import datetime
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from places import SUPPORT
from torch.distributed import PrefixStore, ProcessGroupGloo
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.utils import StatelessProcessGroup

from areal_lite.actors.rollout import RolloutActor
from areal_lite.actors.trainer import OnlineTrainerActor

FOLDER = "NCCL_STAND_IN_FOLDER"
"""Variable of the environment: a run's folder of logs, where `ask_for` leaves what shall happen."""


def before_broadcast(rank: int, number: int) -> None:
    """Replaced by what makes ranks fail; gets the rank and how many broadcasts its communicator has had."""


class Operation(NamedTuple):
    """What a process asked of its GPU, in the order in which it asked."""

    rank: int
    """Of the group."""
    group: str
    """`trainer` or `transfer`; empty where the host waits for a stream."""
    stream: str
    operation: str


operations: list[Operation] = []
"""Of this process, all threads together."""
_stream_of: dict[int, "Stream"] = {}
"""By thread; no `threading.local`, as Ray pickles what its actors here use."""
_DEFAULT = "default"


class Stream:
    """Stands for a CUDA stream, on which everything is done at once."""

    def __init__(self, name: str = "side") -> None:
        self.name = name

    def synchronize(self) -> None:
        operations.append(Operation(-1, "", self.name, "synchronize"))


def _current_stream() -> Stream:
    return _stream_of.get(threading.get_ident()) or Stream(_DEFAULT)


@contextlib.contextmanager
def _on_stream(stream: Stream) -> Iterator[None]:
    before, _stream_of[threading.get_ident()] = _current_stream(), stream
    try:
        yield
    finally:
        _stream_of[threading.get_ident()] = before


class TrainerOperations(TorchDispatchMode):
    """Writes down what this thread asks of the trainer's own process groups."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace and (name := func.name().partition("::")[2]) != "wait_tensor":
            operations.append(Operation(dist.get_rank(), "trainer", _current_stream().name, name))
        return func(*args, **(kwargs or {}))


class StandInCommunicator(PyNcclCommunicator):
    """What vLLM takes for NCCL's; `destroy` is vLLM's own."""

    def __init__(self, group: StatelessProcessGroup) -> None:
        self.group, self.rank, self.world_size = group, group.rank, group.world_size
        self.available, self.disabled, self.device = True, False, torch.device("cpu")
        self.comm = threading.Event()
        self.nccl: Any = SimpleNamespace(ncclCommAbort=threading.Event.set)
        store = PrefixStore("gloo", group.store)
        self._gloo = ProcessGroupGloo(store, group.rank, group.world_size, datetime.timedelta(hours=1))
        self._count = 0

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        if self.disabled:
            return
        stream = stream or _current_stream()
        operations.append(Operation(self.rank, "transfer", stream.name, "broadcast"))
        before_broadcast(self.rank, self._count)
        self._count += 1
        arrived, received = threading.Event(), tensor.clone()

        def run() -> None:
            with contextlib.suppress(RuntimeError):  # gloo notices a dead process, which NCCL does not
                self._gloo.broadcast(received, root=src).wait()
                arrived.set()

        threading.Thread(target=run, daemon=True).start()
        while not arrived.wait(0.005):
            if self.comm.is_set():
                return
        tensor.copy_(received)


def _communicator(host: str, port: int, rank: int, world_size: int, device: Any) -> StandInCommunicator:
    return StandInCommunicator(StatelessProcessGroup.create(host=host, port=port, rank=rank, world_size=world_size))


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """Let this process's vLLM find a GPU's streams and communicators."""
    common = "vllm.distributed.weight_transfer.nccl_common.stateless_init_process_group"
    with contextlib.ExitStack() as patches:
        for target, new in (
            (common, _communicator),
            (
                "vllm.distributed.weight_transfer.packed_tensor._get_streams",
                lambda _, count: tuple(Stream() for _ in range(count)),
            ),
            ("torch.cuda.Stream", Stream),
            ("torch.cuda.stream", _on_stream),
            ("torch.cuda.current_stream", _current_stream),
            ("torch.accelerator.current_device_index", lambda: 0),
            ("torch.accelerator.device_index", lambda _: contextlib.nullcontext()),
            ("torch.accelerator.synchronize", lambda *_: None),
        ):
            patches.enter_context(mock.patch(target, new))
        yield


# --- whole runs: processes of their own, told by files ---


def ask_for(fault: str, *, rank: int, folder: Path) -> None:
    """Have a rank `die` or `hang` in its next broadcast but one."""
    (folder / f"{fault}-{rank}").touch()


_patches: Any = None


def _obey(rank: int, number: int) -> None:
    folder = Path(os.environ[FOLDER])
    for fault, number_sent in (("die", signal.SIGKILL), ("hang", signal.SIGSTOP)):
        if number and (folder / f"{fault}-{rank}").exists():
            (folder / f"{fault}-{rank}").rename(folder / f"{fault}-{rank}-{time.time()}")
            os.kill(os.getpid(), number_sent)


def register() -> None:
    """Called by vLLM in its own processes, as a plug-in."""
    global before_broadcast, _patches
    before_broadcast, _patches = _obey, stand_in()
    _patches.__enter__()


class StandInRolloutActor(RolloutActor):
    """A rollout actor whose engine core has the stand-in."""

    def __init__(self, *args: Any, log_folder: str, **kwargs: Any) -> None:
        super().__init__(*args, log_folder=log_folder, **kwargs)
        os.environ[FOLDER] = log_folder

    async def start(self) -> None:
        """Leave a distribution with a plug-in of vLLM where every process below looks for them."""
        folder = Path(os.environ[FOLDER]) / "site"
        info = folder / "nccl_stand_in-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nccl-stand-in\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[vllm.general_plugins]\nnccl_stand_in = nccl_stand_in:register\n")
        sys.path[:0] = [str(folder), str(SUPPORT)]
        os.environ["PYTHONPATH"] = f"{folder}:{SUPPORT}"
        await super().start()


class StandInTrainerActor(OnlineTrainerActor):
    """A trainer rank with the stand-in."""

    def start(self, **arguments: Any) -> None:
        self._patches = stand_in()  # kept, or they would end at once
        self._patches.__enter__()
        super().start(**arguments)
