"""Arguments of a tool that are bound in many ways."""

import re

WHOLE = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "pattern": r"^[ab]\d{2}$"},
        "unit": {"type": "string", "enum": ["c", "f x"]},
        "either": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        "score": {"type": "number", "minimum": 0.25, "exclusiveMaximum": 0.5},
        "day": {"type": "string", "format": "date"},
        "inner": {
            "type": "object",
            "properties": {
                "s": {"type": "string", "pattern": r"^[\w-]x\d$"},
                "n": {"type": "number", "maximum": 3},
            },
            "required": ["s", "n"],
        },
    },
    "required": ["code", "unit", "score", "day", "inner"],
    "additionalProperties": False,
}


def follows(given):
    """True if arguments follow WHOLE."""
    inner, either = given["inner"], given.get("either")
    return (
        set(given) - {"either"} == set(WHOLE["required"])
        and re.fullmatch(r"[ab][0-9]{2}", given["code"])
        and given["unit"] in ("c", "f x")
        and 0.25 <= given["score"] < 0.5
        and re.fullmatch(r"[0-9]{4}-[01][0-9]-[0-3][0-9]", given["day"])
        and re.fullmatch(r"[a-zA-Z0-9_-]x[0-9]", inner["s"])
        and inner["n"] <= 3
        and (either is None or either == "null" or len(either) <= 3)
    )
