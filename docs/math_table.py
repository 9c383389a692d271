"""Makes docs/math-verifier.md from docs/math-verifier.json: what people and the verifier `math` say about tricky pairs.

.venv/bin/python docs/math_table.py score

scores every pair anew and makes the page; without an argument it makes the page from the scores in the JSON file. A
pair is added to that file by hand, with `expected` as a person judges it, before its score is known.
"""

import json
import sys
from importlib.metadata import version
from typing import Any

import page

PAIR_HEADER = ("reference", "completion", "a person says", "`math` says", "")
FAMILY_HEADER = ("family", "pairs", "agreed", "taken for equal", "taken for unequal")
VERDICTS = {True: "equal", False: "not equal"}


def parts(content: dict[str, Any]) -> dict[str, str]:
    """Return what goes into the template."""
    pairs = content["pairs"]
    wrong = [pair for pair in pairs if pair["scored"] != pair["expected"]]
    families = list(dict.fromkeys(pair["family"] for pair in pairs))
    return {
        "library": content["library"],
        "agreed": f"{len(pairs) - len(wrong)} of {len(pairs)}",
        "families": page.markdown_table(FAMILY_HEADER, (family_row(family, pairs) for family in families)),
        "wrong": pair_table(wrong),
        "pairs": "\n\n".join(
            f"**{family}**\n\n{pair_table([pair for pair in pairs if pair['family'] == family])}" for family in families
        ),
    }


def family_row(family: str, pairs: list[dict[str, Any]]) -> list[str]:
    """Count the pairs of one family; the last two columns are the disagreements."""
    members = [pair for pair in pairs if pair["family"] == family]
    wrong = [pair for pair in members if pair["scored"] != pair["expected"]]
    accepted = sum(pair["scored"] is True for pair in wrong)
    return [family, *map(str, (len(members), len(members) - len(wrong), accepted, len(wrong) - accepted))]


def pair_table(pairs: list[dict[str, Any]]) -> str:
    """Render pairs; the last column marks disagreements."""
    rows = []
    for pair in pairs:
        said = [VERDICTS.get(pair[key], str(pair[key])) for key in ("expected", "scored")]
        mark = "" if pair["expected"] == pair["scored"] else "**disagree**"
        rows.append([f"`{pair['reference']}`", f"`{pair['completion']}`", *said, mark])
    return page.markdown_table(PAIR_HEADER, rows)


def scored(pair: dict[str, Any]) -> dict[str, Any]:
    """Score a pair; an error of the verifier's is put down by its name."""
    from areal_lite.verify.builtin.math import MathArguments, math

    try:
        verdict: bool | str = bool(math("", pair["completion"], pair["reference"], MathArguments()))
    except Exception as error:
        verdict = type(error).__name__
    return {**pair, "scored": verdict}


def as_json(content: dict[str, Any]) -> str:
    """Write one pair a line, so that a changed pair is a changed line."""
    pairs = ",\n".join(f"  {json.dumps(pair)}" for pair in content["pairs"])
    return f'{{\n "library": {json.dumps(content["library"])},\n "pairs": [\n{pairs}\n ]\n}}\n'


def main() -> None:
    """Score the pairs anew if asked to, and make the page."""
    if sys.argv[1:] == ["score"]:
        pairs = list(map(scored, page.load("math-verifier")["pairs"]))
        content = {"library": f"math-verify {version('math-verify')}", "pairs": pairs}
        (page.HERE / "math-verifier.json").write_text(as_json(content))
    page.write_page("math-verifier", parts(page.load("math-verifier")))


if __name__ == "__main__":
    main()
