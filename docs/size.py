"""Lines of Python by folder: all of them, and pure code (without docstrings, comments and blank lines).

    python docs/size.py

What git tracks or would track is counted, links are not followed. Recipes, pages, scripts and styles count as lines.
"""

import ast
import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ("areal_lite", "actors", "launch")
LINES_ONLY = {".yaml", ".js", ".css", ".html", ".sh", ".sbatch"}


def pure_lines(source: str) -> int:
    """Count the lines that hold code: what is left when docstrings, comments and blank lines are gone."""
    tree = ast.parse(source)
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):  # a string that stands alone documents what is around or above it
            if isinstance(child, ast.Expr) and isinstance(getattr(child.value, "value", None), str):
                docstrings.update(range(child.lineno, (child.end_lineno or child.lineno) + 1))
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and number not in docstrings
        for number, line in enumerate(source.splitlines(), start=1)
    )


def room(path: Path) -> str:
    """Name the row that a file is counted in: two folders deep inside the package, one elsewhere."""
    depth = 2 if path.parts[0] in PACKAGE else 1
    return "/".join(path.parts[: min(depth, len(path.parts) - 1)])


def main() -> None:
    """Print the table, then the sums."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\n")  # fmt: skip
    files, lines, code = Counter[str](), Counter[str](), Counter[str]()
    for path in map(Path, listed):
        if path.suffix not in LINES_ONLY | {".py"} or (ROOT / path).is_symlink() or not (ROOT / path).exists():
            continue
        if path.parts[0] not in (*PACKAGE, "benchmarks", "examples", "docs", "tests"):
            continue
        source = (ROOT / path).read_text()
        names = [room(path), "package" if path.parts[0] in PACKAGE else "", "everything"]
        for name in filter(None, names):
            files[name] += 1
            lines[name] += source.count("\n")
            code[name] += pure_lines(source) if path.suffix == ".py" else 0
    print(f"{'folder':<28}{'files':>7}{'lines':>9}{'pure code':>11}")
    for name in [*sorted(files.keys() - {"package", "everything"}), "package", "everything"]:
        print(f"{name:<28}{files[name]:>7,}{lines[name]:>9,}{code[name]:>11,}")
    print("\npackage = areal_lite + actors + launch; pure code = Python without docstrings, comments and blank lines")


if __name__ == "__main__":
    main()
