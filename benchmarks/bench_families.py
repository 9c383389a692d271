"""Measure how far engine and trainer are apart for each family of models (docs/models.md), and for models in folders.

    PYTHONPATH=tests/support .venv/bin/python benchmarks/bench_families.py [FAMILY or FOLDER ...]

In float32 and bfloat16: after a weight sync, and one update of the trainer later, so that stale weights show.
"""

import argparse
import functools
import json
import multiprocessing
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from engine_builders import BackgroundLoop, SyncClient, publish_to, vllm_engine
from families import DECODER, FAMILIES, GROUPED, VOCABULARY, WINDOWED, save_model, sharpen
from places import DOCS
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from areal_lite.config.recipe import Config, parse_config
from areal_lite.launch.bench.harness import surroundings
from areal_lite.launch.run.parity import Difference
from areal_lite.node import source_hash
from areal_lite.rollout.engine import Sampling
from areal_lite.rollout.vllm_engine import VllmEngine
from areal_lite.train.distributed import join_process_group, leave_process_group, open_store
from areal_lite.train.trainer import Trainer
from areal_lite.weights.families import PublishedValues
from areal_lite.weights.publisher import WeightPublisher

HOST, PORTS = "127.0.0.1", range(20000, 22000)
LEARNING_RATE = 1e-5
tokens = torch.randint(2, VOCABULARY, (3, 60), generator=torch.Generator().manual_seed(0)).tolist()
SEQUENCES = [(row[:5], row[5:]) for row in tokens]
"""Longer than a sliding window."""
QUESTIONS = ("Why is the sky blue?", "Write a short story about a fox.", "What is 17 times 23?", "Name five rivers.")
Rounding = Callable[[Tensor], Tensor]
MIXTURE = GROUPED | {"head_dim": 32, "num_experts_per_tok": 2}
DEEPSEEK = DECODER | {
    "moe_intermediate_size": 48, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
MORE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral": ("Mistral", WINDOWED),
    "Ministral": ("Ministral", WINDOWED),
    "SmolLM3": ("SmolLM3", GROUPED | {"no_rope_layers": [1, 0]}),
    "Gemma": ("Gemma", GROUPED | {"head_dim": 32}),
    "OLMo": ("Olmo", GROUPED),
    "OLMo 2": ("Olmo2", GROUPED),
    "OLMo 3": ("Olmo3", GROUPED | {"sliding_window": 16}),
    "Granite": ("Granite", GROUPED | {
        "embedding_multiplier": 2.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
    }),
    "GLM-4": ("Glm4", GROUPED | {"head_dim": 32}),
    "Exaone 4": ("Exaone4", GROUPED | {
        "sliding_window": 16, "sliding_window_pattern": 2, "layer_types": ["sliding_attention", "full_attention"],
    }),
    "Ernie 4.5": ("Ernie4_5", GROUPED | {"head_dim": 32}),
    "Cohere": ("Cohere", GROUPED),
    "Cohere 2": ("Cohere2", GROUPED | {"sliding_window": 16, "head_dim": 32}),
    "StarCoder 2": ("Starcoder2", GROUPED),
    "StableLM": ("StableLm", GROUPED),
    "Nemotron": ("Nemotron", GROUPED | {"head_dim": 32}),
    "Seed-OSS": ("SeedOss", GROUPED | {"head_dim": 32}),
    "Hunyuan": ("HunYuanDenseV1", GROUPED | {"head_dim": 32}),
    "Mixtral": ("Mixtral", MIXTURE | {"num_local_experts": 4}),
    "OLMoE": ("Olmoe", GROUPED | {"num_experts": 4, "num_experts_per_tok": 2}),
    "Qwen2-MoE": ("Qwen2Moe", MIXTURE | {
        "num_experts": 4, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }),
    "Phi-MoE": ("Phimoe", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Ernie 4.5 MoE": ("Ernie4_5_Moe", MIXTURE | {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 0, "moe_layer_end_index": 1,
    }),
    "Granite-MoE": ("GraniteMoe", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "DeepSeek-V2": ("DeepseekV2", DEEPSEEK | {"q_lora_rank": None}),
    "DeepSeek-V3": ("DeepseekV3", DEEPSEEK | {"q_lora_rank": 16, "topk_method": "noaux_tc"}),
    "MiniMax-M2": ("MiniMaxM2", MIXTURE | {"num_local_experts": 4, "rotary_dim": 32}),
    "Qwen3-Next": ("Qwen3Next", MIXTURE | {
        "num_experts": 4, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48, "mlp_only_layers": [],
        "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 32,
        "linear_value_head_dim": 32, "layer_types": ["linear_attention", "full_attention"], "decoder_sparse_step": 1,
    }),
}  # fmt: skip
"""Further ones, which no test runs."""
ALL_FAMILIES = FAMILIES | MORE_FAMILIES


class Run:
    """A trainer of one rank and an engine, with what a run does between two steps."""

    def __init__(self, config: Config, folder: str, engine: VllmEngine, background: BackgroundLoop) -> None:
        self._engine, self._background = engine, background
        self.trainer = Trainer(config, model_folder=folder, rank=0)
        self.model = self.trainer.model.eval()
        self.sequences = SEQUENCES
        self._published = PublishedValues()
        self._version = 0
        settings: dict[str, Any] = {"host": HOST, "ports": PORTS, "timeout_s": 120.0}
        dtype = getattr(torch, config.compute_dtype)
        self._publisher = WeightPublisher(self.model, transport="gloo", dtype=dtype, rank=0, **settings)
        client = SyncClient(engine, background.loop)
        assert self._publisher.connect({"engine": client}, group_client=client, num_engine_ranks=1) == {"engine": None}

    def publish(self) -> None:
        """Hand the trainer's weights over to the engine."""
        self._version += 1
        publish_to(self._engine, self._background, self._publisher, version=self._version)

    def sample(self) -> None:
        """Have the engine answer some questions: what is compared from now on."""
        template = functools.partial(self._engine.tokenizer.apply_chat_template, add_generation_prompt=True)
        for number, question in enumerate(QUESTIONS * 2):
            prompt = template([{"role": "user", "content": question}], tokenize=True, return_dict=False)
            sampling = Sampling(max_new_tokens=96, temperature=1.0, seed=number)
            sample = self._background.call(self._engine.generate(prompt, sampling), timeout_s=300)
            self.sequences = [*(self.sequences if number else []), (prompt, sample.token_ids.tolist())]

    def difference(self, expected: Sequence[Any] | None = None) -> dict[str, float]:
        """Compare the engine's log-probabilities with the trainer's, or others."""
        scored = [self._background.call(self._engine.score(*one), timeout_s=300)[0] for one in self.sequences]
        return asdict(Difference.between(scored, expected or self.trainer.score(self.sequences)))

    def missed(self) -> int:
        """Parameters that did not arrive, by their fingerprints."""
        held = {"engine": self._background.call(self._engine.parameter_squares(), timeout_s=300)}
        return len(self._published.missed(self._publisher.squares(), held).get("engine", []))

    def unequal(self) -> int:
        """Parameters that the engine holds otherwise, as of the last comparison."""
        return len(self._published.unequal("engine"))

    def update(self, lr: float) -> None:
        """Make AdamW's first step: every second sequence was good, the others were bad."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        for number, (prompt, output) in enumerate(self.sequences):
            logits_TV = self.model(input_ids=torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
            loss = nn.functional.cross_entropy(logits_TV.float(), torch.tensor(output))
            (loss if number % 2 else -loss).backward()
        optimizer.step()

    @contextmanager
    def linear_weights(self, rounding: Rounding) -> Iterator[None]:
        """Round the weights of the decoder layers' linear layers for a while."""
        layers = [layer for name, layer in self.model.named_modules() if is_rounded(name, layer)]
        own = [value.to_local() if isinstance(value := layer.weight, DTensor) else value.data for layer in layers]
        before = [value.clone() for value in own]
        with torch.no_grad():
            for value in own:
                value.copy_(rounding(value))
            yield
            for value, old in zip(own, before, strict=True):
                value.copy_(old)

    @contextmanager
    def linear_inputs(self, rounding: Rounding) -> Iterator[None]:
        """Round what those layers compute with for a while."""
        layers = [layer for name, layer in self.model.named_modules() if is_rounded(name, layer)]
        hooks = [layer.register_forward_pre_hook(lambda _, inputs: (rounding(inputs[0]),)) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def is_rounded(name: str, layer: nn.Module) -> bool:
    """Tell whether vLLM would quantise a layer."""
    return isinstance(layer, nn.Linear) and ".layers." in f".{name}"


def fp8(value: Tensor, *, by_row: bool = False) -> Tensor:
    """Round to FP8 (e4m3) and back, with one scale for all or for each row, as vLLM's `quantization: fp8` does."""
    largest = value.abs().amax(dim=-1, keepdim=True) if by_row else value.abs().amax()
    scale = largest.float().clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return ((value.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(value.dtype)


def make_config(folder: str, dtype: str) -> Config:
    """Make a recipe for the model of a folder."""
    context = min(512, json.loads((Path(folder) / "config.json").read_text()).get("max_position_embeddings", 256))
    return parse_config(
        {
            "model": {"path": folder, "max_context": context, "compute_dtype": dtype},
            "rollout": {"slots": 16, "kv_cache_mb": 128},
            "trainer": {"micro_batch_tokens": 512},
        }
    )


@contextmanager
def running(folder: str, dtype: str) -> Iterator[Run]:
    """Start an engine, then join a process group of one for the trainer's model."""
    config = make_config(folder, dtype)
    with vllm_engine(config, folder) as (engine, background):
        store = open_store(HOST, PORTS)
        join_process_group(f"{HOST}:{store.port}", rank=0, world_size=1, device="cpu", timeout_s=120.0)
        try:
            yield Run(config, folder, engine, background)
        finally:
            leave_process_group()


def measure(name: str, dtype: str, *, lr: float = LEARNING_RATE) -> dict[str, Any]:
    """Measure a family's tiny model, or the model of a folder.

    Returns:
        Nats between engine and trainer: `correct`, after a weight sync; `behind`, after one more update of the trainer;
        beside that, how many parameters their fingerprints say differ (`missed` while behind, `lost` when not). A
        folder's model in bfloat16 is also measured with what is rounded to FP8.
    """
    with tempfile.TemporaryDirectory() as temporary:
        is_folder = Path(name).is_dir()
        with running(name if is_folder else save_model(*ALL_FAMILIES[name], temporary), dtype) as run:
            if is_folder:
                run.sample()
            else:
                sharpen(run.model, seed=1)  # every parameter is another than the engine's
            run.publish()
            row: dict[str, Any] = {"family": Path(name).name, "dtype": dtype, "lr": lr, "correct": run.difference()}
            row["lost"], row["unequal"] = run.missed(), run.unequal()
            if is_folder and dtype == "bfloat16":
                row["fp8"] = measure_fp8(run)
            run.update(lr)
            row["behind"], row["missed"] = run.difference(), run.missed()
            run.publish()
            row["again"], row["lost"] = run.difference(), row["lost"] + run.missed()
            return row


def measure_fp8(run: Run) -> dict[str, dict[str, float]]:
    """An engine with rounded weights, beside a trainer with rounded weights and inputs, each against the trainer."""
    expected = run.trainer.score(run.sequences)
    with run.linear_weights(fp8):
        run.publish()
        with run.linear_inputs(functools.partial(fp8, by_row=True)):
            rounded = run.trainer.score(run.sequences)
    found = {
        "weights": run.difference(expected),
        "weights and inputs": asdict(Difference.between(rounded, expected)),
    }
    run.publish()
    return found


def row_of(name: str, dtype: str) -> dict[str, Any]:
    """Measure, and return the row, or one with the error."""
    try:
        row = measure(name, dtype)
    except Exception as error:
        reason = re.sub(r"/\S+", "its folder", f"{type(error).__name__}: {error}".splitlines()[0])
        row = {"family": Path(name).name, "dtype": dtype, "failed": reason[:200]}
    return row | {"source": source_hash()}


def main(names: Sequence[str]) -> None:
    """Measure two at a time, and keep all other rows; the file is of this source once all rows are.

    Without names, rows that are of this source are skipped.
    """
    path, now = DOCS / "families.json", source_hash()
    rows = {(row["family"], row["dtype"]): row for row in json.loads(path.read_text())["rows"] if "dtype" in row}
    cases = [(name, dtype) for name in names or ALL_FAMILIES for dtype in ("float32", "bfloat16")]
    cases = [case for case in cases if names or rows.get(case, {}).get("source") != now]
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        for waiting in as_completed([pool.submit(row_of, *case) for case in cases]):
            row = waiting.result()
            print(json.dumps(row), flush=True)
            rows[row["family"], row["dtype"]] = row
            sources = {row.get("source") for row in rows.values()}
            place = surroundings() | {"source": sources.pop() if len(sources) == 1 else None}
            path.write_text(json.dumps({**place, "rows": list(rows.values())}, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="FAMILY or FOLDER", help=f"default: all of {', '.join(ALL_FAMILIES)}"
    )
    named = parser.parse_args().names
    if unknown := [name for name in named if name not in ALL_FAMILIES and not Path(name).is_dir()]:
        parser.error(f"expected a family or a model folder, got {', '.join(unknown)}")
    main(named)
