"""JSON from files that anyone may have written: read, or refused with a reason of one line."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any


def parse(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is none, it is nested more deeply than Python reads, or a number in it is none of JSON's.
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
    """The beginning of a value's JSON; of a large one no more than that is written."""
    chunks = json.JSONEncoder().iterencode(value)
    text = "".join(chunk[: length + 1] for chunk in islice(chunks, length + 1))
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
