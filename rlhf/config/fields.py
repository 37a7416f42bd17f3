"""What sections of the schema are made of: the base of each, and the types of single values."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError


def _not_a_boolean(value: Any) -> Any:
    """Refuse true and false where a number belongs: pydantic alone would take them for 1 and 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("boolean", "Input should be a number, not true or false")
    return value


_Number = BeforeValidator(_not_a_boolean)
Integer = Annotated[int, _Number]
PositiveInt = Annotated[int, Field(ge=1), _Number]
NonNegativeInt = Annotated[int, Field(ge=0), _Number]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False), _Number]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False), _Number]
FloatAboveOne = Annotated[float, Field(gt=1, allow_inf_nan=False), _Number]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False), _Number]
Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False), _Number]
ZeroStage = Annotated[Literal[1, 2, 3], _Number]
NonEmptyText = Annotated[str, Field(min_length=1)]
ModuleName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class Section(BaseModel):
    """Base of every section: immutable, and an unknown key is an error (invariant 11)."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
