"""What an op that is a manual region computes, as its custom call's `backend_config`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, Self


class BaseForm:
    """A dataclass of plain values that is written as JSON."""

    def text(self) -> str:
        """As the custom call's `backend_config`."""
        return json.dumps(asdict(self), sort_keys=True)  # type: ignore[call-overload]

    @classmethod
    def parse(cls, config: str) -> Self:
        """Read a `backend_config`.

        Raises:
            ValueError: it is not one of this form.
        """
        try:
            return cls(**json.loads(config))
        except (TypeError, ValueError):
            package = cls.__module__.split(".")[1]
            raise ValueError(
                f"{config!r} is no backend_config of an {package}: see autoshard/{package}/form.py"
            ) from None

    @classmethod
    def of(cls, attrs: Mapping[str, Any]) -> Self:
        """Of the attributes of a graph op."""
        return cls(**{each.name: attrs[each.name] for each in fields(cls)})  # type: ignore[arg-type]
