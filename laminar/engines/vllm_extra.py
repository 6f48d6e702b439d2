"""What may stand in rollout.vllm.extra: any argument of vLLM that no setting of ours decides."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from typing import Any


def unknown_extra(extra: Mapping[str, Any], ours: Collection[str]) -> str:
    """What is wrong with it, or nothing. Imports vLLM only if there is something to look at."""
    if not extra:
        return ""
    from vllm import AsyncEngineArgs

    fields = dataclasses.fields(AsyncEngineArgs)
    known = [field.name for field in fields if not field.name.startswith("_")]
    for key in extra:
        if key in ours:
            return f"rollout.vllm.extra.{key} is decided by the settings of rollout; leave it out"
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            return f"rollout.vllm.extra.{key} is not an argument of vLLM; the nearest is {near}"
    return ""
