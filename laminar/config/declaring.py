"""Building blocks for the declarations of settings.

Gives   Section; doc and path_form, for a key; the types of several keys
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


def doc(text: str) -> Meta:
    """Attach the description of a key, for configs/reference.toml."""
    return Meta(description=text)


def path_form(form: str) -> Meta:
    """Mark a path, or a list of them, that paths.py makes absolute.

    `form`: "file"; "code" or "code:name", a Python file or module; "model", which may be a name on
    the hub; or "word" of a command, which may be a file."""
    return Meta(extra={"path": form})


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

    def uses(self, part: Section) -> bool:
        """Return whether a part's keys decide anything."""
        return part.is_used
