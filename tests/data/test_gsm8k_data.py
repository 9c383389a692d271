"""The real GSM8K files through the loader and the built-in verifier."""

import os
from decimal import Decimal
from pathlib import Path

import pytest

from areal_lite.config.data import SourceConfig
from areal_lite.data.sources import load_tasks
from areal_lite.verify.builtin.text import last_number

pytestmark = pytest.mark.data


@pytest.fixture(params=["train", "test"])
def gsm8k_file(request):
    folder = os.environ.get("AREAL_LITE_GSM8K_DIR")
    if not folder:
        pytest.fail(
            "tests marked `data` need AREAL_LITE_GSM8K_DIR, a folder with GSM8K's train.jsonl and test.jsonl; it is "
            'not set: set it, or leave these tests out with -m "not data"'
        )
    return Path(folder) / f"{request.param}.jsonl"


def test_every_row_loads_and_scores_against_its_own_answer_only(gsm8k_file):
    """The reference is read here by splitting at `####`, not by the verifier's own code.

    Seen failing with thousands separators not removed from numbers.
    """
    source = SourceConfig(source="jsonl", path=str(gsm8k_file), max_bad_fraction=0.0)
    tasks = load_tasks(source, "train", where="data")
    assert len(tasks) == sum(bool(line.strip()) for line in gsm8k_file.read_bytes().split(b"\n"))
    answers = [Decimal(task.answer.split("####")[1].strip().replace(",", "")) for task in tasks]
    for index, task in enumerate(tasks):
        assert last_number()(task.prompt, task.answer, task.answer) == 1.0
        assert last_number()(task.prompt, task.answer, str(answers[index])) == 1.0
        shifted = last_number()(task.prompt, tasks[index - 1].answer, task.answer)
        assert shifted == float(answers[index - 1] == answers[index])
