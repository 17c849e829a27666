"""The model that the tests of plugins translate for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from proxy.models import Capabilities, Model
from proxy.testing import MODEL


def make_model(max_output_tokens: int = 64_000, **capabilities: Any) -> Model:
    """A model that can do everything but what is said."""
    return replace(MODEL, max_output_tokens=max_output_tokens, capabilities=Capabilities(**capabilities))
