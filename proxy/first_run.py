"""What somebody sees who starts the gateway for the first time: lines to try, and a conversation that shows caching."""

from __future__ import annotations

from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from proxy.setting_types import BUILT_IN
from proxy.settings import Config

HANDBOOK = "You answer questions about a handbook of bicycle repair. " + " ".join(
    f"Chapter {number} is about part {number} of the bicycle: how it is taken off, cleaned, greased and put back."
    for number in range(1, 41)
)
QUESTIONS = ("What is chapter 3 about?", "And chapter 7?", "Which of the two parts is greased?")


def greeting(config: Config, url: str) -> str:
    """The address, and with a built-in upstream a key and lines to try."""
    lines = [f"EZAT Router listens on {url}"]
    key, model = first_key(config), first_model(config)
    if key is None or not all(upstream.base_url in BUILT_IN for upstream in config.upstreams.values()):
        return "\n".join(lines)
    lines += [
        f"key: {key}",
        "",
        "curl",
        f"  curl {url}/openai/v1/chat/completions -H 'Authorization: Bearer {key}' \\",
        f"""    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'""",
        "Python, OpenAI SDK",
        f'  client = openai.OpenAI(base_url="{url}/openai/v1", api_key="{key}")',
        "Python, Anthropic SDK",
        f'  client = anthropic.Anthropic(base_url="{url}", api_key="{key}")',
        "Node, OpenAI SDK",
        f'  const client = new OpenAI({{ baseURL: "{url}/openai/v1", apiKey: "{key}" }})',
        "Node, Anthropic SDK",
        f'  const client = new Anthropic({{ baseURL: "{url}", apiKey: "{key}" }})',
        "Claude Code",
        f"  ANTHROPIC_BASE_URL={url} ANTHROPIC_AUTH_TOKEN={key} ANTHROPIC_MODEL={model} claude",
        "An editor with an OpenAI-compatible provider",
        f"  base URL {url}/openai/v1 · key {key} · model {model}",
        "",
        "A conversation that shows the prompt cache at work: make demo",
    ]
    return "\n".join(lines)


def first_key(config: Config) -> str | None:
    """The first key that the list of plugins names: shown for the demo alone, whose key is no secret."""
    for entry in config.plugins:
        for key in entry.settings.get("keys") or ():
            secret = key.get("key") if isinstance(key, dict) else None
            if isinstance(secret, str):
                return secret
    return None


def first_model(config: Config) -> str:
    """A name for the first model."""
    model = config.models[0]
    return model.aliases[0] if model.aliases else model.id


async def conversation(url: str, key: str | None, model: str) -> Table:
    """Three turns over one long prompt, through OpenAI's format, and what each read from the cache."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": HANDBOOK}]
    table = Table("turn", "prompt tokens", "read from the cache", "written to it", "share read", title="Prompt caching")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(headers=headers) as session:
        for number, question in enumerate(QUESTIONS, 1):
            messages.append({"role": "user", "content": question})
            body = {"model": model, "max_tokens": 60, "messages": messages}
            async with session.post(f"{url}/openai/v1/chat/completions", json=body) as answer:
                answer.raise_for_status()
                completion = await answer.json()
            message, usage = completion["choices"][0]["message"], completion["usage"]
            messages.append(message)
            details = usage["prompt_tokens_details"]
            counts = (usage["prompt_tokens"], details["cached_tokens"], details["cache_write_tokens"])
            table.add_row(str(number), *map(str, counts), f"{100 * counts[1] // counts[0]} %")
    return table


def show(table: Table) -> None:
    """Print it."""
    console = Console()
    console.print(table)
    console.print("The client sent no cache marks: the gateway set them, and every turn read the one before.")
