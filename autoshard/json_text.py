"""Reads untrusted JSON, or refuses it with a one-line reason."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any


def parse(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: invalid JSON, nested too deeply for Python, or with a number that JSON does not have.
    """
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        if "integer string conversion" in str(error):
            raise ValueError("a whole number in it has thousands of digits") from None
        raise


def shortened(value: Any, length: int = 60) -> str:
    """The beginning of a value's JSON, without serialising all of a large one."""
    chunks = json.JSONEncoder().iterencode(value)
    text = "".join(chunk[: length + 1] for chunk in islice(chunks, length + 1))
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
