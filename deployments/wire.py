"""What comes from outside as JSON: the base of its types, and the errors that name its fields."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from deployments.api_error import ApiError


class Wire(BaseModel):
    """Base of what comes from outside: no coercion, no NaN, no unknown names.

    Unknown names are found here and not by pydantic's `extra="forbid"`, which would make one error for
    each of a million of them; lists stop at their first error for the same reason.
    """

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    @classmethod
    def names(cls) -> set[str]:
        """Those of its fields, on the wire: pydantic has methods by the name of some."""
        return {field.alias or name for name, field in cls.model_fields.items()}

    @model_validator(mode="before")
    @classmethod
    def _no_unknown_names(cls, data: Any) -> Any:
        if isinstance(data, dict):
            known = cls.names()
            for name in data:
                if name not in known:
                    raise PydanticCustomError("unknown_parameter", "unknown field", {"name": name[:100]})
        return data


def only(*neutral: Any) -> AfterValidator:
    """For a field that is known but not served: null and these values, which change nothing."""

    def check(value: Any) -> Any:
        # True == 1 in Python, not on the wire.
        if value is None or any(type(value) is type(each) and value == each for each in neutral):
            return value
        allowed = " or ".join(msgspec.json.encode(each).decode() for each in (None, *neutral))
        raise PydanticCustomError(
            "unsupported_parameter", "this server supports only {allowed} here", {"allowed": allowed}
        )

    return AfterValidator(check)


def refusal(error: ValidationError) -> ApiError:
    """The first thing that is wrong, as a 400 whose `param` names the field."""
    first: ErrorDetails = error.errors(include_url=False, include_input=False)[0]
    param = ""
    for step in (*first["loc"], first.get("ctx", {}).get("name")):
        if isinstance(step, int):
            param += f"[{step}]"
        elif step is not None and not step.startswith("<"):  # those are tags of unions
            param += f".{step}" if param else step
    kind = first["type"]
    code = _CODES.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")
    return ApiError(400, f"Invalid value for '{param}': {first['msg']}.", param=param, code=code)


_CODES = {
    "missing": "missing_required_parameter",
    "unknown_parameter": "unknown_parameter",
    "unsupported_parameter": "unsupported_parameter",
    "unsupported_value": "unsupported_value",
}
