"""The environments that the clients run in: one for each lock, kept below ``.cache/clients`` until the lock changes.

Each client has an environment of its own, so that an old one meets the packages of its time and none meets the
gateway's.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from tests.process import REPOSITORY

CACHE = REPOSITORY / ".cache" / "clients"
LOCKS = {
    "newest": REPOSITORY / "requirements-clients.lock",
    "old_openai": Path(__file__).parent / "locks" / "old_openai.lock",
    "old_anthropic": Path(__file__).parent / "locks" / "old_anthropic.lock",
}
NODE_FOLDER = Path(__file__).parent / "node"
AGENT_PROGRAMS = {"claude": ".bin/claude", "opencode": "opencode-linux-x64-baseline/bin/opencode"}
NOWHERE = "http://127.0.0.1:9"
"""A proxy that doesn't exist, for whoever would go further than loopback."""
QUIET = {
    "ANONYMIZED_TELEMETRY": "false",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "HTTPS_PROXY": NOWHERE,
    "HTTP_PROXY": NOWHERE,
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    "LOGFIRE_SEND_TO_LOGFIRE": "false",
    "NO_PROXY": "127.0.0.1,localhost",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OTEL_SDK_DISABLED": "true",
}
"""What clients report, and fetch, unasked: nothing of it, here."""


def python_of(name: str) -> str:
    """The Python of an environment, installed first where it is missing or older than its lock.

    Raises CalledProcessError where it can't be installed.
    """
    lock, folder = LOCKS[name], CACHE / name
    stamp, digest = folder / "installed-lock", hashlib.sha256(LOCKS[name].read_bytes()).hexdigest()
    python = str(folder / "bin" / "python")
    if stamp.exists() and stamp.read_text() == digest:
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes"]
    subprocess.run([*install, "--requirement", str(lock)], check=True, stdin=subprocess.DEVNULL)
    stamp.write_text(digest)
    return python


def node_packages() -> Path:
    """The folder of the scripts for Node. Raises AssertionError where their packages are not installed."""
    installed = (NODE_FOLDER / "node_modules").is_dir()
    assert installed, "the packages of tests/clients/node are not installed; `make test-clients` does it"
    return NODE_FOLDER


def agent_program(name: str) -> str:
    """The program of a coding agent."""
    return str(node_packages() / "node_modules" / AGENT_PROGRAMS[name])


def surroundings(path: str, home: Path) -> dict[str, str]:
    """The environment variables that a client is given: a search path, an empty home, and quiet."""
    return {"PATH": path, "HOME": str(home), "TMPDIR": str(home), "LANG": "C.UTF-8", **QUIET}


if __name__ == "__main__":
    for each in sys.argv[1:] or LOCKS:
        print(f"==> the clients' environment {each}: {python_of(each)}", flush=True)
