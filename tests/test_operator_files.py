"""The image: what is in it, how it serves, and that it gives a first answer.

No test needs a Docker daemon: the image's instructions are read, what they copy is copied into a folder, and the
gateway is started from there as the container would start it. So a file that is missing in the image is missed here.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from proxy.config import load
from proxy.settings import Server
from tests.operator_files import (
    PAGE,
    copy_into,
    environment_of,
    is_sent,
    references,
    sources_of,
    stages_of,
    yaml_of,
)
from tests.process import REPOSITORY, GatewayProcess, started_gateway
from tests.test_docs import rows

STAGES = stages_of((REPOSITORY / "Dockerfile").read_text())
FINAL = STAGES[-1]
IGNORED = (REPOSITORY / ".dockerignore").read_text()
CONTAINER = "config/container.yaml"


def the(name: str) -> list[str]:
    """The words of the final stage's last instruction of this name."""
    return [instruction.words for instruction in FINAL if instruction.name == name][-1]


def test_the_image_has_what_was_locked() -> None:
    """Nothing is installed that a hash doesn't vouch for, and nothing is built on the way."""
    installs = [
        each.words[0] for stage in STAGES for each in stage if each.name == "RUN" and "install " in each.words[0]
    ]
    pip = [words for words in installs if "pip" in words]

    assert 1 == len(pip)
    assert "--require-hashes --only-binary :all: --requirement requirements.lock" in re.sub(r"\s+", " ", pip[0])
    assert ["requirements.lock"] == [source for source, _ in sources_of(STAGES[0])]
    assert not [words for words in installs if "apt" in words]


def test_both_stages_stand_on_the_same_python() -> None:
    """The environment that the first stage makes runs in the second, on the version that the tests run on."""
    assert 1 == len({stage[0].words[0] for stage in STAGES})
    assert f"python:{sys.version_info.major}.{sys.version_info.minor}-slim-bookworm" == FINAL[0].words[0]


def test_the_image_serves_as_a_user_without_rights() -> None:
    """The process is not root's, and the user has a number, by which a cluster's policies judge."""
    names = [instruction.name for instruction in FINAL]

    assert re.fullmatch(r"([1-9]\d{3,}):\1", the("USER")[0])
    assert names.index("USER") < names.index("ENTRYPOINT") < names.index("CMD")
    assert not [each for each in FINAL[names.index("USER") :] if each.name in ("RUN", "COPY")]
    assert not [each for each in FINAL if each.name == "COPY" and "chown" in each.flags], "the code belongs to root"


def test_the_image_stops_and_listens_as_the_gateway_does() -> None:
    """SIGTERM reaches the gateway itself, not a shell, and the ports are its defaults."""
    assert ["SIGTERM"] == the("STOPSIGNAL")
    assert ["python", "run.py"] == the("ENTRYPOINT")
    assert [str(Server().port), str(Server().admin.port)] == the("EXPOSE")
    assert ["/data"] == the("VOLUME")


def test_what_the_image_copies_is_there_and_sent() -> None:
    """Each source of a COPY exists, and .dockerignore lets it through."""
    for source, _ in [pair for stage in STAGES for pair in sources_of(stage)]:
        path = REPOSITORY / source
        inside = [source] if path.is_file() else [str(each.relative_to(REPOSITORY)) for each in path.iterdir()]
        assert [name for name in inside if is_sent(name, IGNORED)], source


SENT = {
    "run.py": True,
    "requirements.lock": True,
    "proxy/store/migrations/script.py.mako": True,
    "plugins/chat_completions/tables.py": True,
    "config/models.yaml": True,
    "proxy/__pycache__/server.cpython-311.pyc": False,
    ".env": False,
    ".git/config": False,
    ".venv/bin/python": False,
    "data/ezat.db": False,
    "data/admin-token": False,
    "config/key.txt": False,
    "config/.env": False,
    "config/gateway.yaml": False,
    "config/mine.yaml": False,
    "key.pem": False,
    "tests/process.py": False,
}


@pytest.mark.parametrize(("name", "sent"), SENT.items(), ids=SENT)
def test_nothing_secret_is_sent_to_the_builder(name: str, sent: bool) -> None:
    """What comes to lie in a checkout (keys, databases, configurations with secrets) never gets into an image."""
    assert sent == is_sent(name, IGNORED)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the image serves from."""
    folder = tmp_path_factory.mktemp("image")
    copy_into(folder, REPOSITORY, FINAL)
    return folder


def container_environment(data: Path, **more: str) -> dict[str, str]:
    """That of a container whose volume is ``data``, but on loopback and on free ports."""
    image_sets = {name: value for name, value in environment_of(FINAL).items() if name != "PATH"}
    ports = {"EZAT_HOST": "127.0.0.1", "EZAT_PORT": "0", "EZAT_ADMIN_HOST": "127.0.0.1", "EZAT_ADMIN_PORT": "0"}
    return {"PATH": os.environ["PATH"], **image_sets, **ports, "EZAT_STORE": f"sqlite:///{data}/ezat.db", **more}


@contextmanager
def started_container(
    image: Path, arguments: list[str], environment: Mapping[str, str], folder: Path
) -> Iterator[GatewayProcess]:
    """``docker run IMAGE ARGUMENTS``, without Docker."""
    command = [sys.executable, *the("ENTRYPOINT")[1:], *arguments]
    with (folder / "output").open("wb") as output, (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=image, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=log
        )
    gateway = GatewayProcess(process, folder)
    try:
        gateway.wait_until_ready()
        yield gateway
    finally:
        gateway.stop()


def state_of(folder: Path) -> dict[str, tuple[int, int]]:
    found = {path: path.stat() for path in folder.rglob("*")}
    return {str(path): (stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}


def answer_to(gateway: GatewayProcess, key: str) -> str:
    """What the assistant says to a greeting."""
    body = {"model": "claude-sonnet-5-5", "messages": [{"role": "user", "content": "Hello!"}]}
    request = urllib.request.Request(
        f"{gateway.url}/openai/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"authorization": f"Bearer {key}"},
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


@pytest.mark.slow
def test_the_image_gives_a_first_answer_without_a_provider(image: Path, tmp_path: Path) -> None:
    """``docker run IMAGE`` serves the demo; it needs no variable, and writes nowhere but into its volume."""
    before = state_of(image)

    with started_container(image, the("CMD"), container_environment(tmp_path), tmp_path) as gateway:
        answer = answer_to(gateway, "ezat_sk_demo")

    assert "You said: “Hello!”." in answer
    assert before == state_of(image)
    assert (tmp_path / "ezat.db").exists()


@pytest.mark.slow
def test_the_image_serves_a_provider_with_keys_from_its_store(image: Path, tmp_path: Path) -> None:
    """With config/container.yaml a key is made in the container, and a client is answered."""
    environment = container_environment(tmp_path, ANTHROPIC_API_KEY="provider-key", EZAT_UPSTREAM="demo")
    command = [sys.executable, "run.py", "--config", CONTAINER, "keys", "create", "alice"]
    before = state_of(image)

    made = subprocess.run(command, cwd=image, env=environment, capture_output=True, text=True, check=True, timeout=30)
    with started_container(image, ["--config", CONTAINER], environment, tmp_path) as gateway:
        answer = answer_to(gateway, made.stdout.strip())

    assert "You said: “Hello!”." in answer
    assert before == state_of(image)


def judged_healthy(port: int) -> bool:
    """What the image's health check says of a port of this machine."""
    command = [sys.executable, *the("HEALTHCHECK")[1:]]
    return 0 == subprocess.run(command, env={"EZAT_PORT": str(port)}, capture_output=True, timeout=10).returncode


@pytest.mark.slow
@pytest.mark.parametrize("base_path", ["", "/llm"], ids=["at the root", "below a base path"])
def test_the_health_check_finds_a_gateway_that_lives(base_path: str, tmp_path: Path) -> None:
    """A gateway that answers is healthy, wherever its paths begin."""
    demo = yaml_of("config/demo.yaml")

    with started_gateway({**demo, "server": {"base_path": base_path}}, tmp_path) as gateway:
        assert judged_healthy(urlsplit(gateway.url).port or 0)


def test_the_health_check_finds_that_nobody_answers() -> None:
    """A port that nobody listens on is not healthy."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert not judged_healthy(bound.getsockname()[1])


def test_the_demo_in_a_container_is_the_demo() -> None:
    """What one tries in a container is what one tries outside."""
    apart = {"server", "store"}
    demo, contained = yaml_of("config/demo.yaml"), yaml_of("config/demo-container.yaml")

    assert {**demo, **{name: contained[name] for name in apart}} == contained


def test_a_container_has_every_plugin() -> None:
    """What the default configuration does, that for containers does, in the same order."""
    environ = {"ANTHROPIC_API_KEY": "provider-key", "EZAT_KEY": "ezat_sk_first"}
    default, contained = (load(REPOSITORY / path, environ) for path in ("config/gateway.yaml", CONTAINER))

    assert [entry.name for entry in default.plugins] == [entry.name for entry in contained.plugins]
    assert default.models == contained.models


def test_the_variables_of_a_container_are_documented() -> None:
    """The page lists each variable with its default."""
    expected = {
        f"`{name}`": f"`{default}`" if default else "required" for name, default in references(CONTAINER).items()
    }

    assert expected == {row[0]: row[1] for row in rows(PAGE, "Docker")}
