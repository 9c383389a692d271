"""The parts of `bench gpu-check` without vLLM and Ray: machine, trainer step, log-probabilities, attention.

On a CPU the same code runs at a tiny shape. Shape letters: `T` tokens, `H` hidden size, `V` vocabulary.
"""

import gc
import inspect
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # of no module in torch's stubs
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from torch.profiler import ProfilerActivity, profile

from areal_lite.algo.logprobs import token_entropies, token_logprobs
from areal_lite.config.recipe import Config
from areal_lite.errors import TrainerError
from areal_lite.launch.bench.gpu_part import Job
from areal_lite.network import port_range
from areal_lite.train import memory
from areal_lite.train.chunked_logits import CHUNK_ELEMENTS, LazyLogits, read_in_chunks
from areal_lite.train.distributed import join_process_group, leave_process_group, open_store
from areal_lite.train.trainer import Trainer
from areal_lite.types import Row, Sample, Shard, StopReason, VersionSpan

MODEL = "Qwen/Qwen3-1.7B"
"""Whose shape the random model has."""
_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512}  # fmt: skip
"""The same on a CPU."""
_ROUNDED = 0.05
"""By which attention's results may differ: two roundings of bfloat16 numbers below 8."""
_GIB = 2**30

Way = Callable[[], Tensor]
"""To compute something from tensors that it knows."""


# ---------------------------------------------------------------- machine


def machine(job: Job) -> None:
    """Try what everything else needs; measure a copy, a product of matrices, and the way from the host."""
    command = [sys.executable, "-P", "-m", "areal_lite.launch.commands.main", "doctor"]
    doctor = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    has_header = Path(sysconfig.get_paths()["include"], "Python.h").is_file()
    job.report(compiler=shutil.which("gcc") or shutil.which("cc"), python_header=has_header, cores=os.cpu_count())
    job.report(**_bandwidths(job.device))
    # Triton compiles its launcher with the C compiler and Python's header; without it no engine starts.
    compiled = torch.compile(lambda values: values.sin() + 1)
    job.report(compiles=float(compiled(torch.zeros(8, device=job.device)).sum()) == 8)
    job.report(doctor=doctor.communicate()[0].splitlines())  # no verdict: it wants the very versions that are pinned


def _bandwidths(device: str) -> dict[str, float]:
    size, side = (4 * _GIB, 8192) if device == "cuda" else (2**24, 256)
    source, goal = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    host = torch.zeros(size // 4, dtype=torch.uint8, pin_memory=device == "cuda")
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    return {
        "copy_gb_s": size / 1e9 / seconds(lambda: goal.copy_(source), device=device),
        "from_host_gb_s": len(host) / 1e9 / seconds(lambda: goal[: len(host)].copy_(host), device=device),
        "product_tflops": 2 * side**3 / 1e12 / seconds(lambda: left @ right, device=device),
    }


def seconds(work: Callable[[], object], *, device: str, repeats: int = 3) -> float:
    """Return the median duration of something that was done once before."""
    found = []
    for _ in range(repeats + 1):
        _wait(device)
        begun = time.perf_counter()
        work()
        _wait(device)
        found.append(time.perf_counter() - begun)
    return statistics.median(found[1:])


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _measured(work: Callable[[], object], *, device: str) -> dict[str, Any]:
    """Return the `seconds` of something, and the most GiB that tensors took of the GPU meanwhile."""
    if device != "cuda":
        return {"seconds": seconds(work, device=device), "peak_gib": None}
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return {
        "seconds": seconds(work, device=device),
        "peak_gib": torch.cuda.max_memory_allocated() / _GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / _GIB,
    }


def _compare(job: Job, ways: Mapping[str, Way], *, inputs: Sequence[Tensor]) -> dict[str, float]:
    """Report what each way to compute the same takes, forward and backward; return its difference from the first."""

    def both_ways(way: Way) -> None:
        torch.autograd.grad(way().sum(), inputs)

    results: list[Tensor] = []
    differences = {}
    for name, way in ways.items():
        figures = _measured(partial(both_ways, way), device=job.device)
        with torch.no_grad():
            results.append(way().float())
        differences[name] = float((results[-1] - results[0]).abs().max())
        job.report(**{name: {**figures, "difference": differences[name]}})
    return differences


# ---------------------------------------------------------------- a trainer step


def random_model(job: Job) -> Path:
    """Return a folder with a model of random weights, drawn where it will run; each token has a character of its own.

    So a reward of the text is one of the token ids, and completions hardly ever end by themselves.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from areal_lite.data.arith import CHARACTERS
    from areal_lite.data.tokenizer import build_char_tokenizer

    folder = Path(str(job.model_folder))
    if folder.is_dir():
        return folder
    shape = memory.KNOWN["models"][MODEL] | (_TINY if job.device == "cpu" else {})
    others = map(chr, itertools.count(0x10000))  # no surrogates there
    tokenizer = build_char_tokenizer(
        CHARACTERS + "".join(itertools.islice(others, shape["vocab_size"] - len(CHARACTERS) - 2))
    )
    config = AutoConfig.for_model(**shape, max_position_embeddings=4096, eos_token_id=tokenizer.eos_token_id)
    torch.manual_seed(0)
    with torch.device(job.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    unfinished = folder.with_name(".model")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)
    return folder


def step(job: Job) -> None:
    """Train steps of full rows without an engine, with and without recomputation, and profile one of them."""
    folder = str(random_model(job))
    configs = {
        kind: job.config("run", **{"trainer.activation_checkpointing": kind == "recomputed"})
        for kind in ("kept", "recomputed")
    }
    with _one_rank(job.device):
        trainer = Trainer(configs["kept"], model_folder=folder, rank=0)
        for kind, config in configs.items():
            if kind == "recomputed":
                trainer.model.gradient_checkpointing_enable()  # type: ignore[operator]
            shard = _full_rows(config)
            tokens = sum(len(row.prompt_token_ids) + row.sample.num_tokens for row in shard.rows)
            train = partial(_train, trainer, shard)
            figures = _measured(train, device=job.device)
            step_s = figures.pop("seconds")
            figures |= {"step_s": step_s, "tokens_per_s": tokens / step_s, "tokens": tokens}
            figures |= _beside_the_estimate(config, tokens / step_s, kept=configs["kept"], device=job.device)
            job.report(**{kind: figures})
        job.report(profile=profiled(train, device=job.device))  # last: it is what a machine may not allow


@contextmanager
def _one_rank(device: str) -> Iterator[None]:
    """A process group of one, which FSDP needs in bfloat16."""
    store = open_store("127.0.0.1", port_range("20000-21999"))
    join_process_group(f"127.0.0.1:{store.port}", rank=0, world_size=1, device=device, timeout_s=60)
    try:
        yield
    finally:
        leave_process_group()


def _beside_the_estimate(config: Config, tokens_per_s: float, *, kept: Config, device: str) -> dict[str, float]:
    """Return the estimated peak in GiB, and MFU by the operations of a step that keeps its activations (`kept`)."""
    architecture = memory.architecture_of(config)
    estimate, tflops = memory.rank_size(architecture, config), tflops_of(device)
    figures = {"estimate_gib": estimate.peak / _GIB}
    if tflops is not None:
        figures["mfu"] = tokens_per_s / memory.trainer_tokens_per_s(architecture, estimate, kept, tflops=tflops)
    return figures


def _full_rows(config: Config) -> Shard:
    """Return a batch whose rows are as long as the recipe allows, of tokens drawn at random."""
    length, vocabulary = config.rollout.max_new_tokens, memory.architecture_of(config).vocab_size
    rng, queue = np.random.default_rng(0), config.queue
    shape = (queue.groups_per_step, queue.samples_per_group)
    rows = tuple(
        Row(
            group_index=group, sample_index=place, minibatch=0,
            prompt_token_ids=tuple(range(2, 2 + config.model.max_context - length)),
            sample=Sample(
                token_ids=rng.integers(2, vocabulary, length, dtype=np.int32),
                logprobs=np.full(length, -np.log(vocabulary), np.float32),
                spans=(VersionSpan(version=0, start=0, end=length),),
                stop_reason=StopReason.LENGTH,
            ),
        )
        for group, place in np.ndindex(shape)
    )  # fmt: skip
    return Shard(batch_id="step", rank=0, version=0, rewards=rng.random(shape, np.float32), rows=rows)


def _train(trainer: Trainer, shard: Shard) -> None:
    trainer.version = 0
    trainer.train_step(shard)


def tflops_of(device: str) -> float | None:
    """Return the peak of the GPU that is there, in TFLOP/s of bfloat16; None for one that is not known."""
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    return next((card["tflops"] for known, card in memory.KNOWN["gpus"].items() if known in name), None)


def profiled(work: Callable[[], object], *, device: str) -> dict[str, Any]:
    """Return the five kernels that take most of the time, and the share in which none runs."""
    on_gpu = device == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]) as found:
        work()
        _wait(device)
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [one for one in found.events() if one.device_type == kind and not one.is_user_annotation]
    if not events:
        raise TrainerError("the profiler must see kernels, it saw none: the driver may not allow tracing (CUPTI)")
    taken = Counter[str]()
    for one in events:
        taken[one.name[:80]] += one.time_range.elapsed_us() if on_gpu else one.self_cpu_time_total
    largest = {name: us / sum(taken.values()) for name, us in taken.most_common(5)}
    return {
        "kernels": largest,
        "words": ", ".join(f"`{name}` {share:.0%}" for name, share in largest.items()),
        "idle_share": idle_share((one.time_range.start, one.time_range.end) for one in events),
    }


def idle_share(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the share of the time between the first start and the last end in which nothing runs.

    >>> idle_share([(0, 4), (1, 2), (6, 10)])
    0.2
    """
    first, *others = sorted(intervals)
    (start, end), idle = first, 0.0
    for begun, ended in others:
        idle += max(0.0, begun - end)
        end = max(end, ended)
    return idle / (end - start)


# ---------------------------------------------------------------- log-probabilities


def logprobs(job: Job) -> None:
    """Compare ways to read log-probabilities and entropies off the output layer, forward and backward."""
    num_tokens, hidden_size, vocabulary = (8192, 2048, 151_936) if job.device == "cuda" else (96, 32, 512)
    make = partial(torch.randn, dtype=torch.bfloat16, device=job.device, requires_grad=True)
    torch.manual_seed(0)
    hidden_TH, weight_VH = make(num_tokens, hidden_size), make(vocabulary, hidden_size)
    with torch.no_grad():
        weight_VH.mul_(0.02)  # logits near 1, as models have them
    ids_T = torch.randint(vocabulary, (num_tokens,), device=job.device)

    def read(logits_TV: Tensor, ids_T: Tensor) -> Tensor:
        entropies_T = token_entropies(logits_TV, temperature=1.0)
        return torch.stack([token_logprobs(logits_TV, ids_T, temperature=1.0), entropies_T], dim=1)

    def whole() -> Tensor:
        return read(linear(hidden_TH, weight_VH), ids_T)

    def in_pieces(elements: int) -> Tensor:
        logits: Any = linear(LazyLogits(hidden_TH.unsqueeze(0), lambda chunk: chunk), weight_VH)
        return read_in_chunks(logits, read, ids_T, chunk_elements=elements)

    @torch.compile
    def fused() -> Tensor:
        logprobs_TV = linear(hidden_TH, weight_VH).float().log_softmax(dim=-1)
        entropies_T = -(logprobs_TV.detach().exp() * logprobs_TV.detach()).sum(dim=-1)
        return torch.stack([logprobs_TV.gather(1, ids_T.unsqueeze(1)).squeeze(1), entropies_T], dim=1)

    shipped = CHUNK_ELEMENTS * num_tokens * vocabulary // (8192 * 151_936)  # as many pieces on a CPU
    pieces, large_pieces = partial(in_pieces, shipped), partial(in_pieces, 8 * shipped)
    ways: dict[str, Way] = {"whole": whole, "pieces": pieces, "large_pieces": large_pieces, "fused": fused}
    _compare(job, ways, inputs=[hidden_TH, weight_VH])  # entropies have no gradient


# ---------------------------------------------------------------- attention


def varlen(job: Job) -> None:
    """Compare attention over packed rows with padded ones, forward and backward."""
    from torch.nn.attention import varlen

    longest, heads, pairs, width = (2048, 16, 8, 128) if job.device == "cuda" else (32, 4, 2, 16)
    lengths = [max(1, longest * eighths // 8) for eighths in (8, 6, 4, 3, 2, 2, 1, 1)]
    make = partial(torch.randn, dtype=torch.bfloat16, device=job.device, requires_grad=True)
    torch.manual_seed(0)
    query, key, value = (make(sum(lengths), count, width) for count in (heads, pairs, pairs))
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=job.device)
    # PyTorch 2.11 has no such argument, and accepts fewer heads of keys as they are.
    options: Any = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters else {}
    options["window_size"] = (-1, 0)  # causal

    def packed() -> Tensor:
        found: Any = varlen.varlen_attn(query, key, value, ends, ends, longest, longest, **options)
        return torch.as_tensor(found)

    def padded() -> Tensor:
        rows: Any = [
            pad_sequence(list(torch.split(one, lengths)), batch_first=True).transpose(1, 2)
            for one in (query, key, value)
        ]
        found = scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True).transpose(1, 2)  # type: ignore[misc]
        return torch.cat([row[:length] for row, length in zip(found, lengths, strict=True)])

    ways = {"padded": padded, "packed": packed}
    difference = _compare(job, ways, inputs=[query, key, value])["packed"]
    job.report(difference=difference, tokens=sum(lengths), padded_tokens=len(lengths) * longest)
    if not difference <= _ROUNDED:
        job.report(problems=[f"packed and padded attention must agree within {_ROUNDED}, got {difference:.2g}"])
