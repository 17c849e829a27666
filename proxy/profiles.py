"""Whether deployments can do what their models claim, as far as their profiles say what was found out."""

from __future__ import annotations

from collections.abc import Iterator

from proxy.settings import CapabilitySettings, Config, ProfileSettings
from proxy.yaml_source import Loc

_CLAIMS = ("sampling", "prompt_caching", "forced_tool_choice", "images", "pdfs", "structured_outputs")
_WITHOUT_THINKING = "low"


def misfits(config: Config) -> Iterator[tuple[Loc, str]]:
    """What a profile says against its model: its place, and what is wrong."""
    for number, model in enumerate(config.models):
        for place, deployment in enumerate(model.deployments):
            loc: Loc = ("models", number, "deployments", place, "profile")
            for name, claim, advice in _unfounded(model.capabilities, deployment.profile):
                yield (*loc, name), f"the deployment can't do what the model claims, {claim}; {advice}"


def _unfounded(claimed: CapabilitySettings, found: ProfileSettings) -> Iterator[tuple[str, str, str]]:
    """The field of the profile, the claim that it refutes, and what to write instead."""
    for name in _CLAIMS:
        if getattr(claimed, name) and getattr(found, name) is False:
            yield name, name, _write(f"{name}: false")
    if claimed.sampling and not claimed.sampling_exclusive and found.sampling_exclusive:
        yield "sampling_exclusive", "temperature together with top_p", _write("sampling_exclusive: true")
    if found.effort is not None and (missing := [level for level in claimed.effort if level not in found.effort]):
        kept = ", ".join(level for level in claimed.effort if level in found.effort)
        yield "effort", f"effort {', '.join(missing)}", _write(f"effort: [{kept}]")
    if found.thinking is False and any(level != _WITHOUT_THINKING for level in claimed.effort):
        yield "thinking", "thinking, which goes with effort above low", _write("effort: [low]` or `effort: false")


def _write(capability: str) -> str:
    return f"say `{capability}` in the model's capabilities, or take the deployment out"
