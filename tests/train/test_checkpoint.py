"""Checkpoints: bit-equal continuation, other numbers of ranks, other models, broken folders, export."""

import contextlib
import datetime
import json
import pickle
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from run_folders import write_checkpoint
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from train_builders import full_state, make_config, save_tiny_model, shard_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_lite.errors import CheckpointError
from areal_lite.record.checkpoints import damage, seal
from areal_lite.train import distributed
from areal_lite.train.checkpoint import files_of
from areal_lite.train.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


PPO = {"objective": {"preset": "ppo", "kl_target": 1e-3}, "critic": {"lr": 1e-2}}
"""With a critic and a KL coefficient that moves at every step of these tests."""
LORA = {"trainer": {"lora": {"rank": 4}}}


def make_trainer(model_folder: str, **sections: Any) -> Trainer:
    return Trainer(make_config(**sections), model_folder=model_folder, rank=0)


def assert_equal(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value) if isinstance(value, torch.Tensor) else got[name] == value, name


@pytest.mark.parametrize(
    ("sections", "steps", "coefficients"), [({}, 0, [None]), (LORA, 1, [None]), (PPO, 1, [0.1, 0.025])]
)
def test_continuation_is_bit_equal(
    model_folder: str, tmp_path: Path, sections: dict[str, Any], steps: int, coefficients: list[float | None]
) -> None:
    """Step or none, save, step equals load, step, adapters, critic and adaptive KL coefficient included.

    Seen failing with the critic not loaded, with the coefficient not saved, with the adapters' state left out, and
    without optimiser state from the start: torch then takes a step to make it, which counts.
    """
    straight, saved, resumed = (make_trainer(model_folder, **sections) for _ in range(3))
    for version in range(steps):
        for trainer in (straight, saved):
            trainer.train_step(shard_of(version))
    saved.snapshot()(tmp_path / "checkpoint")
    resumed.load(tmp_path / "checkpoint")
    assert resumed.version == steps
    assert_equal(full_state(resumed), full_state(saved))
    logged = [trainer.train_step(shard_of(steps)) for trainer in (straight, saved, resumed)]
    assert logged[0]["kl_coef"] in coefficients
    assert logged[2]["kl_coef"] == logged[0]["kl_coef"]
    assert logged[2]["value_loss"] == logged[0]["value_loss"]
    assert_equal(full_state(saved), full_state(straight))
    assert_equal(full_state(resumed), full_state(straight))
    assert any(name.startswith("critic.") for name in full_state(straight)) == ("critic" in sections)


def test_a_checkpoint_without_a_critic(model_folder: str, tmp_path: Path) -> None:
    """It is refused where the recipe has a critic; one with a critic serves a recipe without."""
    make_trainer(model_folder).snapshot()(tmp_path / "without")
    make_trainer(model_folder, **PPO).snapshot()(tmp_path / "with")
    with pytest.raises(CheckpointError, match=r"objective\.baseline=critic needs a checkpoint with a critic, got none"):
        make_trainer(model_folder, **PPO).load(tmp_path / "without")
    plain = make_trainer(model_folder)
    plain.load(tmp_path / "with")
    assert plain.version == 0


def test_an_older_checkpoint_has_no_coefficients_and_no_outputs(
    model_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One written before there were any still loads, with a word, and the recipe's coefficients count."""
    make_trainer(model_folder).snapshot()(tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    del meta["coefficients"], meta["outputs"]
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    trainer = make_trainer(model_folder, objective={"preset": "grpo", "kl_target": 1.0})
    trainer.load(tmp_path)
    assert trainer.train_step(shard_of(0))["kl_coef"] == 0.04
    assert "the loaded model is not compared" in caplog.text


def test_another_critic_is_refused(model_folder: str, tmp_path: Path) -> None:
    """Before the policy is touched."""
    trainer, fresh = make_trainer(model_folder, **PPO), make_trainer(model_folder, **PPO)
    before = full_state(fresh)
    trainer.train_step(shard_of(0))
    trainer.snapshot()(tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    meta["critic"]["score.weight"] = [[1, 64], "torch.float32"]
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(CheckpointError, match=r"checkpoint in .*critic"):
        fresh.load(tmp_path)
    assert_equal(full_state(fresh), before)


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"num_layers": 1}, r"model\.layers\.1\..* must be no such parameter, got \[\[32\]"),
        ({"tie_embeddings": False}, r"lm_head\.weight must be \[\[12, 32\].*, got no such parameter"),
    ],
)
def test_another_model_is_refused_with_the_difference(
    model_folder: str, tmp_path: Path, other: dict[str, Any], difference: str
) -> None:
    make_trainer(model_folder).snapshot()(tmp_path / "checkpoint")
    trainer = make_trainer(save_tiny_model(tmp_path / "other", **other))
    before = full_state(trainer)
    with pytest.raises(CheckpointError, match=difference):
        trainer.load(tmp_path / "checkpoint")
    assert_equal(full_state(trainer), before)


@pytest.mark.parametrize("damage", ["nothing there", "cut meta", "other meta", "no data", "cut data"])
def test_a_broken_checkpoint_is_refused(model_folder: str, tmp_path: Path, damage: str) -> None:
    trainer, folder = make_trainer(model_folder), tmp_path / "checkpoint"
    trainer.snapshot()(folder)
    meta, data = folder / "meta.json", next(folder.glob("*.distcp"))
    match damage:
        case "nothing there":
            shutil.rmtree(folder)
        case "cut meta":
            meta.write_text(meta.read_text()[:100])
        case "other meta":
            meta.write_text("[1, 2]")
        case "no data":
            (folder / ".metadata").unlink()
        case "cut data":
            data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"checkpoint.*resume from an older checkpoint"):
        trainer.load(folder)


class Touch:
    """Pickled, it makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("metadata", r"expected only classes that torch writes into metadata, got pathlib\.Path"),
        ("entry", "Missing key"),
    ],
)
def test_code_in_a_checkpoint_does_not_run(model_folder: str, tmp_path: Path, kind: str, message: str) -> None:
    """In `.metadata`, and in an entry that claims to be no tensor. Seen failing with torch's reader: both ran."""
    trainer, folder, ran = make_trainer(model_folder), tmp_path / "checkpoint", tmp_path / "ran"
    trainer.snapshot()(folder)
    code = pickle.dumps(Touch(ran))
    if kind == "entry":
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        place = next(iter(metadata.storage_data.values()))
        file, name = folder / place.relative_path, "model.model.norm.weight"
        place = replace(place, offset=file.stat().st_size, length=len(code))
        metadata.state_dict_metadata[name], metadata.storage_data[MetadataIndex(name)] = BytesStorageMetadata(), place
        file.write_bytes(file.read_bytes() + code)
        code = pickle.dumps(metadata)
    (folder / ".metadata").write_bytes(code)
    with pytest.raises(CheckpointError, match=message):
        trainer.load(folder)
    assert not ran.exists()


@pytest.mark.parametrize("file", ["__0_0.distcp", "meta.json"])
def test_what_cannot_be_written_is_named_with_its_cause(model_folder: str, tmp_path: Path, file: str) -> None:
    """A run goes on without that checkpoint, as with any `CheckpointError`.

    Seen failing with torch's exception, which is none (`Exception`), and with an `OSError`.
    """
    (tmp_path / "checkpoint" / file).mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"cannot be written: IsADirectoryError.*Earlier ones are kept"):
        make_trainer(model_folder).snapshot()(tmp_path / "checkpoint")


def change_a_layer(checkpoint: Path, trainer: Trainer) -> None:
    """Write other weights into a checkpoint of the trainer's, with a manifest that says they are right."""
    meta = (checkpoint / "trainer" / "meta.json").read_bytes()
    with torch.no_grad():
        trainer.model.get_parameter("model.layers.1.mlp.down_proj.weight").mul_(1.5)
    trainer.snapshot()(checkpoint / "trainer")
    (checkpoint / "trainer" / "meta.json").write_bytes(meta)
    (checkpoint / "manifest.json").unlink()
    seal(checkpoint)
    assert not damage(checkpoint)


def test_weights_that_are_not_the_saved_ones_are_refused_though_their_manifest_is_right(
    model_folder: str, tmp_path: Path
) -> None:
    """One layer of two is off by half; with a limit of 0 it is only logged. Seen failing without `check_outputs`."""
    trainer, fresh = make_trainer(model_folder), make_trainer(model_folder)
    trainer.train_step(shard_of(0))
    checkpoint = write_checkpoint(tmp_path, 1, lambda folder: trainer.snapshot()(folder / "trainer"), keep=1)
    change_a_layer(checkpoint, trainer)
    words = r"step-000001/trainer is not the saved one: expected .*, got .*run\.resume_from=step-N"
    with pytest.raises(CheckpointError, match=words):
        fresh.load(checkpoint / "trainer")
    assert fresh.version == 0
    make_trainer(model_folder, weights={"parity_limit": 0}).load(checkpoint / "trainer")


def test_an_export_is_what_came_in_but_for_the_weights(tmp_path: Path) -> None:
    """Dtype, generation config and chat template. The tokenizer's end of sequence is added to the config's.

    Seen failing with the dtype of the master weights in either file; with a generation config that transformers writes,
    which refuses a temperature without do_sample; with 3 alone, at which the tokenizer's texts do not end.
    """
    base, out = Path(save_tiny_model(tmp_path / "model")), tmp_path / "export"
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(base)
    settings = json.loads((base / "generation_config.json").read_text())
    settings |= {"temperature": 0.6, "do_sample": False, "eos_token_id": 3}
    (base / "generation_config.json").write_text(json.dumps(settings))
    (base / "chat_template.jinja").write_text("{{ messages[0].content }}")
    trainer, dtype = make_trainer(str(base)), torch.bfloat16
    trainer.train_step(shard_of(0))
    trainer.export(out)
    exported = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert exported.config.dtype == dtype
    assert {value.dtype for value in load_file(out / "model.safetensors").values()} == {dtype}
    assert_equal(exported.state_dict(), {name: value.to(dtype) for name, value in trainer.model.state_dict().items()})
    assert json.loads((out / "generation_config.json").read_text()) == settings | {"eos_token_id": [3, 1]}
    assert AutoTokenizer.from_pretrained(out).chat_template == "{{ messages[0].content }}"


# --- two real ranks ---------------------------------------------------------------------------------------------------


def cross(rank: int, world_size: int, model_folder: str, folder: str) -> None:
    """Load what one rank wrote, give its state back whole, train a step, save it with two ranks; refuse another.

    These offload, and the one does not. In between, three times: take a snapshot, which a thread writes from the next
    step's end on, while the ranks train on.
    """
    config = make_config(**PPO, trainer={"offload": True, "ranks": 2})
    trainer = Trainer(config, model_folder=model_folder, rank=rank)
    trainer.load(Path(folder) / "one")
    torch.save(full_state(trainer), Path(folder) / f"loaded-{rank}.pt")

    def train() -> None:
        trainer.train_step(shard_of(trainer.version, rank=rank, ranks=2))
        torch.rand(3)

    train()
    trainer.snapshot()(Path(folder) / "two")
    torch.save(full_state(trainer), Path(folder) / f"trained-{rank}.pt")
    for _ in range(3):
        train()
        path, trained = Path(folder) / f"step-{trainer.version}", threading.Event()
        torch.save(full_state(trainer) | {"random": torch.get_rng_state()}, path.with_suffix(f".{rank}"))
        write = trainer.snapshot(copied=True)
        with ThreadPoolExecutor() as pool:
            writing = pool.submit(lambda: trained.wait() and write(path))  # noqa: B023
            train()
            trained.set()
            train()
            writing.result()
    with pytest.raises(CheckpointError, match="is not the saved one"):
        trainer.load(Path(folder) / "step-000001" / "trainer")


@pytest.mark.slow
def test_checkpoints_cross_numbers_of_ranks(model_folder: str, tmp_path: Path) -> None:
    """One rank's checkpoint on two ranks and back: every number is the same, and one step agrees with one rank's.

    With a critic. On two ranks weights that are not the saved ones are refused as well. What is saved beside the
    training is the state of its moment, to the last bit: weights, moments, critic, coefficients and random state.

    Seen failing without the copy.
    """
    one = make_trainer(model_folder, **PPO)
    one.train_step(shard_of(0))
    one.snapshot()(tmp_path / "one")
    other = make_trainer(model_folder, **PPO)
    change_a_layer(write_checkpoint(tmp_path, 1, lambda folder: other.snapshot()(folder / "trainer"), keep=1), other)
    run_ranks(cross, model_folder, str(tmp_path))
    assert_equal(torch.load(tmp_path / "loaded-0.pt"), full_state(one))
    back = make_trainer(model_folder, **PPO)
    back.load(tmp_path / "two")
    assert back.version == 2
    assert_equal(full_state(back), torch.load(tmp_path / "trained-0.pt"))
    one.train_step(shard_of(1))
    for got, expected in ((back.model, one.model), (back.critic.model, one.critic.model)):  # type: ignore[union-attr]
        for name, value in expected.named_parameters():
            torch.testing.assert_close(got.get_parameter(name), value, atol=2e-4, rtol=1e-3)
    two = tmp_path / "two"
    first, second = ({str(path.relative_to(two)) for path in files_of(two, rank)} for rank in (0, 1))
    assert second == {"rng-1.pt", "__1_0.distcp", "critic/__1_0.distcp"}  # what a rank hashes
    assert first == {str(path.relative_to(two)) for path in two.rglob("*") if path.is_file()} - second
    for version in (3, 6, 9):
        back.load(tmp_path / f"step-{version}")
        state = torch.load(tmp_path / f"step-{version}.0")
        assert torch.equal(torch.get_rng_state(), state.pop("random"))
        assert back.version == version
        assert_equal(full_state(back), state)


def gather_beside(rank: int, world_size: int) -> None:
    """Have rank 1 be late at the first group, and nobody at the second."""
    for timeout_s, late_s in ((1, 5), (60, 0)):
        distributed._timeout = datetime.timedelta(seconds=timeout_s)
        group = distributed.new_group_beside()
        dist.barrier()
        time.sleep(late_s * rank)
        with pytest.raises(RuntimeError) if late_s else contextlib.nullcontext():
            dist.all_gather_object([None] * world_size, rank, group=group)
        dist.barrier()


@pytest.mark.slow
def test_a_save_beside_the_training_that_failed_fails_no_later_one() -> None:
    """Seen failing ("Connection closed by peer") with one group for all of them."""
    run_ranks(gather_beside)
