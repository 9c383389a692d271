r"""Writes out in LaTeX what people type in Unicode, and what math-verify's grammar takes for a name."""

import re
import unicodedata

_ROOT = re.compile(r"([√∛∜])\s*(?:(\d+(?:\.\d+)?|\w)|\(([^()]*)\))")
_DEGREES = {"√": "", "∛": "[3]", "∜": "[4]"}
_FRACTION = re.compile("[\u00bc-\u00be\u2150-\u215e\u2189]")
_SHORT_FRACTION = re.compile(r"(\\[dt]?frac)\s*(?:(\d)|\{(\d+)\})\s*(?:(\d)|\{(\d+)\})")
_RAISED = re.compile("[\u00b2\u00b3\u00b9\u2070-\u207f]+")
_LOWERED = re.compile("[\u2080-\u209c]+")
_UPRIGHT = re.compile(r"\\(?:mathrm|text|textrm|operatorname)\s*\{\s*([ei])\s*\}|\{\\rm\s+([ei])\s*\}")
"""The numbers e and i as textbooks set them: with their command they are names."""
_SYMBOLS = {
    **{"°": r"^\circ ", "∞": r"\infty ", "∅": r"\emptyset ", r"\varnothing": r"\emptyset ", "∈": r"\in "},
    **{"·": r"\cdot ", "∙": r"\cdot ", "\u2044": "/", "∩": r"\cap ", "\u222a": r"\cup "},
}


def as_latex(text: str) -> str:
    r"""Return a text in the notation that math-verify reads.

    Example:
        >>> as_latex("x² + 2√3"), as_latex("1¾"), as_latex(r"\frac34"), as_latex("30°")
        ('x^{2} + 2\\sqrt{3}', '1\\frac{3}{4}', '\\frac{3}{4}', '30^\\circ ')
    """
    text = _ROOT.sub(lambda match: rf"\sqrt{_DEGREES[match[1]]}{{{match[2] or match[3]}}}", text)
    text = _FRACTION.sub(lambda match: r"\frac{{{}}}{{{}}}".format(*_compatible(match[0]).split("\u2044")), text)
    text = _SHORT_FRACTION.sub(lambda match: "{}{{{}}}{{{}}}".format(*filter(None, match.groups())), text)
    text = _RAISED.sub(lambda match: f"^{{{_compatible(match[0])}}}", text)
    text = _LOWERED.sub(lambda match: f"_{{{_compatible(match[0])}}}", text)
    text = _UPRIGHT.sub(lambda match: f" {match[1] or match[2]}", text)
    for symbol, latex in _SYMBOLS.items():
        text = text.replace(symbol, latex)
    return text


def _compatible(text: str) -> str:
    return unicodedata.normalize("NFKC", text).replace("\u2212", "-")
