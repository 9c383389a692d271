"""What math-verify and sympy do for the verifier `math`. Importing it takes a second: import it where it is used."""

import logging
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import Eq, Expr, I, MatrixBase, Rational, Set, floor, log, preorder_traversal
from sympy.physics import units

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns, once, that its time limits are off

_LOOK_FOR = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
_DIGITS, _FLOAT_DIGITS = 50, 15
"""to which expressions must agree, without and with a decimal point"""


def parsed(text: str) -> list[Any]:
    """Return what math-verify reads: an expression and its text, or the text alone where it is no mathematics."""
    found = parse(text, extraction_config=_LOOK_FOR, parsing_timeout=None, raise_on_error=True)
    return [_with_imaginary_unit(found[0]), *found[1:]] if found else []


def _with_imaginary_unit(expression: Any) -> Any:
    """Replace the variable i; beside < and > it has no meaning but a variable's."""
    if isinstance(expression, Eq):
        return Eq(*map(_with_imaginary_unit, expression.args), evaluate=False)
    if not isinstance(expression, Expr | MatrixBase | Set):
        return expression
    return expression.subs({symbol: I for symbol in expression.free_symbols if symbol.name == "i"})


def equal(target: list[Any], found: list[Any], decimals: int) -> bool:
    """Compare as math-verify does, whose options count places after the point: a small number needs more of them."""
    numbers = _numbers(target[0])
    sizes = [abs(number.evalf(3)) for number in numbers]
    zeros = max([0, *(-int(floor(log(size, 10))) - 1 for size in sizes if size.is_Float and size)])
    is_float = any(number.is_Float for number in numbers + _numbers(found[0]))
    options = {
        "float_rounding": decimals if zeros < decimals else zeros + 3,
        "numeric_precision": zeros + (_FLOAT_DIGITS if is_float else _DIGITS),
        "allow_set_relation_comp": True,
    }
    return bool(verify(target, found, **options, timeout_seconds=None, raise_on_error=True))


def _numbers(expression: Any) -> list[Any]:
    return [node for node in preorder_traversal(expression) if isinstance(node, Expr) and node.is_number]


def unit_named(name: str) -> Any:
    """Return sympy's unit of a name; None if there is none."""
    found = getattr(units, name, None)
    return found if isinstance(found, units.Quantity) else None


def is_zero(parts: Sequence[tuple[Fraction, Any]]) -> bool:
    """Return whether numbers with units add up to zero, exactly."""
    total = sum(Rational(value.numerator, value.denominator) * unit for value, unit in parts)
    return bool(units.convert_to(total, [units.meter, units.kilogram, units.second]) == 0)
