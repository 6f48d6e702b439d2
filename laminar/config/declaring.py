"""Building blocks for the declarations of settings.

Gives   Section; doc, path_form and decides, for a key; the types of several keys
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


def doc(text: str) -> Meta:
    """Attach the description of a key, for configs/reference.toml."""
    return Meta(description=text)


def path_form(form: str) -> Meta:
    """Mark a path, or a list of them, that paths.py makes absolute.

    `form`: "file", "file:name", or "model", which may be a name on the hub."""
    return Meta(extra={"path": form})


def decides(name: str = "", *, times: int = 1, absent: Any = msgspec.NODEFAULT) -> Meta:
    """Mark a key, or the result of a property, that decisions depend on: a field of `Settings`.

    `name`: its name in the event log, by default the key's. `times`: its unit there, such as 1,000
    for milliseconds of a key in seconds. `absent`: its value in logs without it, which keeps their
    decisions; a key that is added later needs one, a small integer or an empty string."""
    return Meta(extra={"decides": (name, times, absent)})


Natural = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(ge=0.01)]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16"]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: immutable, keyword-only, strict."""

    @property
    def is_used(self) -> bool:
        """Whether the section's keys decide anything; else `Settings` has their `absent` values."""
        return True
