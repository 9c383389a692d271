"""What a clone, a wheel and the images consist of, and the rules that hold for every file."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import ROOT
from test_imports import imports, modules

import areal_lite

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["setuptools"]["packages"]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))

# Never part of the project: environments, caches, build products, what runs leave behind.
NOT_OURS = re.compile(r"__pycache__|.*\.egg-info|build|dist|runs|\.(?!ci$).*")


def walk(folder: Path) -> Iterator[Path]:
    """Every file of the project under a folder; symbolic links are not followed."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not NOT_OURS.fullmatch(name))
        yield from (Path(place, name) for name in sorted(names) if not Path(place, name).is_symlink())


# ---------------------------------------------------------------- packages


def test_the_package_list_is_what_the_folders_are():
    """Seen failing with `areal_lite.verify` taken off the list, and with the link areal_lite/launch removed."""
    links = [path for path in (ROOT / "areal_lite").iterdir() if path.is_symlink()]
    assert {str(link.readlink()) for link in links} == {"../actors", "../launch"}
    assert sorted(name for name, path in modules().items() if path.name == "__init__.py") == PACKAGES


def test_one_version_everywhere():
    """Seen failing with the changelog one version ahead."""
    newest = re.search(r"^## (\d\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == areal_lite.__version__ == PROJECT["project"]["version"]


def test_both_builds_pin_the_same_torch():
    """setup.sh reads the CPU build's pin with a pattern that wants it on one line."""
    extras = PROJECT["project"]["optional-dependencies"]
    pins = {name: [item for item in extras[name] if item.startswith("torch==")] for name in ("cpu", "gpu")}
    assert pins["cpu"] == pins["gpu"]
    assert re.search(r'^cpu = .*"torch==[\d.]+"', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_recipe_and_no_generic_name(tmp_path):
    """A wheel built from a copy: `actors` and `launch` come through their links, under areal_lite alone.

    Seen failing with `areal_lite.launch` off the package list, and with the `package-data` line removed.
    """
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    for name in ("areal_lite", "actors", "launch"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--wheel-dir"]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(tmp_path), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {path.relative_to(ROOT) for path in walk(ROOT / "areal_lite")}
    expected |= {
        Path("areal_lite", path.relative_to(ROOT)) for top in ("actors", "launch") for path in walk(ROOT / top)
    }
    info = f"areal_lite-{areal_lite.__version__}.dist-info/"
    assert {name for name in names if not name.startswith(info)} == {path.as_posix() for path in expected}
    assert f"{info}licenses/LICENSE" in names


# ---------------------------------------------------------------- imports


def loaded(imported: str) -> set[str]:
    """All that a fresh interpreter has loaded after these imports."""
    command = [sys.executable, "-c", f"import {imported}, sys\nprint(*sys.modules)"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.slow
def test_the_core_loads_neither_ray_nor_vllm():
    """Invariant I8, in a fresh interpreter: all modules but the adapters that import vLLM themselves.

    Seen failing with `from areal_lite.weights.gloo import ...` at the top of the optimiser update's module, and with
    `import ray` at the top of run_folder.py.
    """
    outer = ("areal_lite.actors", "areal_lite.launch")
    core = {name: path for name, path in modules().items() if not name.startswith(outer)}
    code = [name for name in core if not any(f"{one}.".startswith("vllm.") for one in imports(core[name]))]
    assert loaded(", ".join(code)) & {"ray", "vllm"} == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("areal_lite.actors.queue, areal_lite.actors.verifier, areal_lite.actors.rollout", {"torch", "transformers"}),
        ("areal_lite.actors.trainer, areal_lite.weights.publisher", {"areal_lite.weights.prepared"}),
        ("areal_lite.launch.run.train, areal_lite.actors.trainer, areal_lite.actors.probe", {"torch"}),
        ("areal_lite.verify.child", {"numpy", "torch", "ray", "vllm", "pydantic"}),
    ],
)
def test_a_process_loads_no_more_than_it_needs(module: str, unwanted: set[str]) -> None:
    """Seconds of every start. Seen failing with `import torch` in rollout/worker.py, and `prepared` above gloo.py.

    The last line but one is the controller; the last is a verifier's process, which is restarted often.
    """
    assert loaded(module) & unwanted == set()


# ---------------------------------------------------------------- images


def copied(dockerfile: Path) -> set[str]:
    """The sources of each COPY, continuation lines joined."""
    lines = dockerfile.read_text().replace("\\\n", " ").splitlines()
    return {source for line in lines if line.startswith("COPY ") for source in line.split()[1:-1]}


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_what_an_image_copies_exists_and_is_what_the_set_up_reads(dockerfile):
    """Seen failing with a misspelt source, and with `COPY launch` removed."""
    assert [name for name in copied(dockerfile) if not (ROOT / name).exists()] == []
    tops = {str(link.readlink()).removeprefix("../") for link in (ROOT / "areal_lite").iterdir() if link.is_symlink()}
    files = {"setup.sh", "pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]}
    assert copied(dockerfile) == files | tops | {"areal_lite", "examples/toy_games"}
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert copied(dockerfile) & set(ignored) == set()


# ---------------------------------------------------------------- every file


def test_no_file_names_a_place_on_somebodys_machine():
    """Seen failing with the checkout's own path in a comment of the Makefile."""
    elsewhere = ["/home/", "/root/", "/Users/", f"{ROOT}/"]
    texts = {path: path.read_text(errors="ignore") for path in walk(ROOT) if path != Path(__file__)}
    assert [(path, word) for path, text in texts.items() for word in elsewhere if word in text] == []
