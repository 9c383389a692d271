"""What shows that a heavy package works here, for `areal-lite doctor` to run."""

from collections.abc import Iterable
from typing import NamedTuple

REMAKE = "rm -rf .venv && make setup"


class Probe(NamedTuple):
    """A few lines of Python that only a working package survives; they print what they found."""

    name: str
    code: str
    remedy: str = REMAKE
    is_needed: bool = True
    """Whether recipes fail without it, the demo first of all."""


_TORCH = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()  # else its threads may outlive the interpreter, which aborts
print(f"torch {torch.__version__}, gloo works")
"""
_NCCL = """
import torch, torch.distributed as dist
assert dist.is_nccl_available(), "this torch was built without NCCL"
assert torch.cuda.is_available(), "torch sees no CUDA device"
print("NCCL", *torch.cuda.nccl.version(), "on", torch.cuda.device_count(), "devices")
"""
# vLLM only logs a warning when its kernels do not load, and fails at the first request.
_ENGINE = """
import torch, vllm
from transformers import Qwen3ForCausalLM
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
current_platform.import_kernels()
assert hasattr(torch.ops._C, "rms_norm"), "vLLM's compiled kernels do not load"
print(f"vllm {vllm.__version__} on {current_platform.device_type}")
"""
_ZEROMQ = """
import zmq
with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
    socket.bind("tcp://127.0.0.1:0")
print(f"libzmq {zmq.zmq_version()}, loopback works")
"""
# As in a verifier's process, which may gain no rights: a bwrap that is setuid root does not work there.
_SANDBOX = """
import ctypes
from areal_lite.verify.builtin.sandbox import choose_kind
ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
choose_kind("bubblewrap")
print("bubblewrap works")
"""


def probes_for(build: str) -> Iterable[Probe]:
    """The probes of the installed build, in the order of the report."""
    remedy = f"if the message names an address or a host: export GLOO_SOCKET_IFNAME=lo; else {REMAKE}"
    yield Probe("torch.distributed", _TORCH, remedy)
    if build == "gpu":
        yield Probe("NCCL", _NCCL, "check the driver with nvidia-smi; it must support CUDA 13")
    # A torchvision built for CUDA beside a CPU torch breaks transformers and the engine; `setup.sh` takes it out.
    builds = f"if it names torchvision: pip uninstall torchvision torchaudio torchcodec; else {REMAKE}"
    yield Probe("engine", _ENGINE, f"if kernels do not load: apt-get install libnuma1; {builds}")
    yield Probe("Ray", "import ray; print('ray', ray.__version__)")
    yield Probe("ZeroMQ", _ZEROMQ)
    yield Probe("code sandbox", _SANDBOX, "only for the verifier code: see docs/security.md", is_needed=False)
