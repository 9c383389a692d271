"""Functions handed on to workers by name: of a module, of a file, or written to a file of their own."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from areal_lite.config.plugin_check import check_plugins
from areal_lite.config.plugins import find_function, reference_to
from areal_lite.config.recipe import parse_config
from areal_lite.errors import ConfigError, PluginError
from areal_lite.launch.commands.main import main
from areal_lite.verify.builtin.text import exact


def brief(prompt: str, completion: str, answer: str, **row: Any) -> float:
    return 1.0 / len(completion)


def test_a_function_of_a_package_goes_by_its_module_and_one_of_a_file_by_its_path(tmp_path: Path) -> None:
    assert reference_to(exact, tmp_path) == "areal_lite.verify.builtin.text:exact"
    name = reference_to(brief, tmp_path)
    assert name == f"{Path(__file__).resolve()}:brief"
    assert find_function(name, kind="verifier")("", "ab", "") == 0.5
    assert list(tmp_path.iterdir()) == []


def test_a_module_of_the_working_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing for a source, which the command itself loads: No module named."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "only_here.py").write_text("def rows(split): return [1]\n")
    assert find_function("only_here:rows", kind="source")("train") == [1]


def test_a_neighbour_with_a_namesake_in_another_folder_is_refused(tmp_path: Path) -> None:
    """Python keeps one module of a name. Seen failing with the first folder's words in the second's function."""
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "words_of_mine.py").write_text(f"WORD = '{folder}'\n")
        (tmp_path / folder / "own.py").write_text(
            "from words_of_mine import WORD\nimport json\ndef run(): return WORD\n"
        )
    (tmp_path / "second" / "json.py").touch()  # a library's name is the library
    (tmp_path / "link").symlink_to(tmp_path / "first")
    for folder in ("first", "link"):
        assert find_function(f"{tmp_path}/{folder}/own.py:run", kind="workflow")() == "first"
    with pytest.raises(PluginError, match=r"second/own.py imports words_of_mine, which is .*first/words_of_mine.py"):
        find_function(f"{tmp_path}/second/own.py:run", kind="workflow")


def test_any_other_function_is_written_down_with_what_it_refers_to(tmp_path: Path) -> None:
    """Two of one name are two files. Seen failing with the name alone for the file: the first one's was lost."""

    def made(length: int) -> Any:
        def score(prompt: str, completion: str, answer: str, **row: Any) -> float:
            return float(len(completion) == length)

        vars(score)["_verifier_batch"] = length
        return score

    names = [reference_to(made(length), tmp_path / "functions") for length in (2, 3)]
    found = [find_function(name, kind="verifier") for name in names]
    assert [function("", "abc", "") for function in found] == [0.0, 1.0]
    assert [vars(function)["_verifier_batch"] for function in found] == [2, 3]
    assert find_function(reference_to(lambda *_: 0.25, tmp_path), kind="loss")() == 0.25
    config = parse_config({"verifier": {"function": {names[0]: 1.0, names[1]: 0.5}}})
    check_plugins(config)
    Path(names[0]).unlink()
    with pytest.raises(ConfigError, match=f"No such file or directory: '{names[0]}'"):
        check_plugins(config)
    with pytest.raises(PluginError, match="cannot be imported: FileNotFoundError"):
        find_function(names[0], kind="verifier")


def test_a_scripts_function_comes_without_the_script(tmp_path: Path) -> None:
    """Importing the script would start its training again. Seen failing with `__main__` named by its path."""
    (tmp_path / "script.py").write_text(
        "from pathlib import Path\n"
        "from areal_lite.config.plugins import reference_to\n"
        "HALF = 0.5\n"
        "def score(*_, **__): return HALF\n"
        "print(reference_to(score, Path('functions')))\n"
    )
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300
    )
    assert find_function(done.stdout.strip(), kind="verifier")("", "", "") == 0.5


def test_a_verifier_from_a_closure_scores_in_its_own_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen failing with its name taken apart and joined again, `...pkl:`."""
    (tmp_path / "data.jsonl").write_text('{"question": "7+5=?", "answer": "12"}\n')
    wanted = "12"
    name = reference_to(lambda prompt, completion, answer, **row: float(completion == wanted), tmp_path)
    assert main(["verify", name, "--data", str(tmp_path / "data.jsonl")]) == 0
    assert "1 scored, 0 failed" in capsys.readouterr().out


def test_what_cannot_be_written_down_is_named_with_a_remedy(tmp_path: Path) -> None:
    lock = threading.Lock()

    def guarded(*_: Any, **__: Any) -> float:
        with lock:
            return 1.0

    with pytest.raises(PluginError, match=r"the function .*guarded must .*cannot pickle '_thread.lock'.*: make locks"):
        reference_to(guarded, tmp_path)
