"""The base of a verifier's arguments: what a recipe may say in `verifier.arguments`, checked as it is read."""

from pydantic import BaseModel, ConfigDict

__all__ = ["Arguments"]


class Arguments(BaseModel):
    """Frozen; no unknown names, no number for a text nor a boolean for a number, no infinity.

    What a field means stands in a docstring below it; one that names something outside the recipe is marked as in
    `config/section.py`.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
