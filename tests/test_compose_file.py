"""What `docker compose up` starts: what is open to whom, what survives, and that the gateway gets what it asks for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import pytest

from proxy.config import load
from tests.operator_files import LONGEST_STOP, PAGE, REFERENCE, references, yaml_of
from tests.process import REPOSITORY
from tests.test_docs import rows

CONTAINER = "config/container.yaml"
SECRET = re.compile(r"KEY|PASSWORD|TOKEN|SECRET")
COMPOSE = yaml_of("compose.yaml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
GIVEN = {"ANTHROPIC_API_KEY": "provider-key", "POSTGRES_PASSWORD": "p@ss/w:rd"}


def interpolated(value: str, given: Mapping[str, str] = GIVEN) -> str:
    """A value as Compose makes it. Raises KeyError where a variable must be set and is not."""
    return REFERENCE.sub(lambda found: given[found[1]] if found[2] != ":-" else given.get(found[1], found[3]), value)


def seconds(duration: str) -> float:
    found = re.fullmatch(r"(?:(\d+)m)?(?:(\d+)s?)?", duration)
    assert found, duration
    return 60 * int(found[1] or 0) + int(found[2] or 0)


def published(service: str) -> list[str]:
    return [interpolated(port) for port in SERVICES[service].get("ports", ())]


def test_no_secret_has_a_default() -> None:
    """Whoever sets nothing gets an error, not a password that everybody knows."""
    found = references("compose.yaml")

    assert set(GIVEN) == {name for name, default in found.items() if default is None}
    assert [] == [name for name, default in found.items() if SECRET.search(name) and default is not None]
    literals = [value for each in SERVICES.values() for name, value in each.get("environment", {}).items()
                if SECRET.search(name) and not name.endswith("__FILE") and "${" not in value]  # fmt: skip
    assert [] == literals


def test_the_variables_of_compose_are_documented() -> None:
    """The page lists each variable that may be set, with its default."""
    expected = {f"`{name}`": f"`{default}`" for name, default in references("compose.yaml").items() if default}

    assert expected == {row[0]: row[1] for row in rows(PAGE, "Compose")}


def test_compose_gives_the_gateway_what_its_configuration_asks_for() -> None:
    """With Compose's environment the configuration loads, and nothing is given that nobody reads."""
    environment = {name: interpolated(value) for name, value in SERVICES["gateway"]["environment"].items()}

    config = load(REPOSITORY / SERVICES["gateway"]["command"][1], environment)

    assert {"PGPASSWORD"} == environment.keys() - references(CONTAINER).keys()
    for url, service, port in ((config.store, "postgres", 5432), (config.limiter, "valkey", 6379)):
        assert (service, port) == (urlsplit(url).hostname, urlsplit(url).port)
        assert {"condition": "service_healthy"} == SERVICES["gateway"]["depends_on"][service]
    database = SERVICES["postgres"]["environment"]
    assert (database["POSTGRES_USER"], f"/{database['POSTGRES_DB']}") == (
        urlsplit(config.store).username,
        urlsplit(config.store).path,
    )
    assert environment["PGPASSWORD"] == interpolated(database["POSTGRES_PASSWORD"]) == GIVEN["POSTGRES_PASSWORD"]


def test_what_compose_publishes_is_for_this_machine() -> None:
    """Unless the operator says otherwise nothing is open to others, and the admin listener never is."""
    ports = [port for service in SERVICES for port in published(service)]

    assert [] == [port for port in ports if not port.startswith("127.0.0.1:")]
    assert ["127.0.0.1:8787:8787", "127.0.0.1:8788:8788"] == published("gateway")
    assert "127.0.0.1:8788:8788" in SERVICES["gateway"]["ports"]
    assert [] == published("postgres") + published("valkey")


def test_the_databases_are_in_a_network_of_their_own() -> None:
    """Nobody but the gateway reaches them, and they reach nobody."""
    inside = {name for name, service in SERVICES.items() if "inner" in service["networks"]}

    assert COMPOSE["networks"]["inner"]["internal"] is True
    assert {"gateway", "postgres", "valkey"} == inside
    assert [["inner"], ["inner"]] == [SERVICES[name]["networks"] for name in ("postgres", "valkey")]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_of_compose_is_hardened_and_watched(name: str) -> None:
    """A service that is broken into can write little and gain nothing; one that hangs is seen."""
    service = SERVICES[name]

    assert service["read_only"] is True
    assert ["ALL"] == service["cap_drop"]
    assert "cap_add" not in service
    assert ["no-new-privileges:true"] == service["security_opt"]
    assert "unless-stopped" == service["restart"]
    assert "healthcheck" in service or "build" in service, "the image has one"
    assert re.search(r":v?\d", service.get("image", ":0")), "a version, not the latest one"


def test_what_was_acknowledged_survives_a_loss_of_power() -> None:
    """PostgreSQL commits to the disk before it answers, into a volume."""
    command, volumes = SERVICES["postgres"]["command"], SERVICES["postgres"]["volumes"]

    assert {"synchronous_commit=on", "fsync=on"} <= set(command)
    assert ["postgres:/var/lib/postgresql"] == volumes
    assert {"postgres", "prometheus", "grafana"} == COMPOSE["volumes"].keys()


def test_compose_waits_for_a_stop() -> None:
    """Running answers may end before the container is killed."""
    assert seconds(SERVICES["gateway"]["stop_grace_period"]) > LONGEST_STOP


def test_what_compose_mounts_is_there() -> None:
    """Each file that a service mounts from the checkout exists, and is mounted so that the service can't change it."""
    mounts = [volume for service in SERVICES.values() for volume in service.get("volumes", ()) if volume[0] == "."]

    assert mounts
    for mount in mounts:
        source, _, mode = mount.split(":")
        assert (REPOSITORY / source).exists(), source
        assert "ro" == mode


def test_secrets_of_compose_stay_out_of_git() -> None:
    """The files that an operator puts secrets into are none that git takes."""
    ignored = (REPOSITORY / ".gitignore").read_text().splitlines()

    assert {"data/", ".env"} <= set(ignored)
    assert {"./data"} == {os.path.dirname(secret["file"]) for secret in COMPOSE["secrets"].values()}


def test_docker_takes_the_compose_file() -> None:
    """Where Docker Compose is at hand, it reads the file without a complaint."""
    command = ["docker", "compose", "--profile", "monitoring", "config", "--quiet"]
    environment = {**os.environ, **GIVEN}
    if shutil.which("docker") is None or subprocess.run([*command[:2], "version"], capture_output=True).returncode:
        pytest.skip("docker compose is not installed")

    ended = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=30)

    assert (0, "") == (ended.returncode, ended.stderr)
