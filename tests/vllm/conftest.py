"""These tests need vLLM: `make test-vllm` sets up an environment of their own and runs them."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("vllm") is None else []
