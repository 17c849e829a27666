"""A port that several processes of one gateway are to share, kept from everybody else."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from proxy.errors import CannotStart


@contextmanager
def reserved(host: str, port: int) -> Iterator[int]:
    """The port, which workers may share; 0 has become a free one. Raises CannotStart where somebody else has it.

    The reservation is bound and doesn't listen, so that no connection goes there.
    """
    taken = port
    with ExitStack() as reservations:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            for family, address in dict.fromkeys((each[0], each[4]) for each in found):
                place = (address[0], taken, *address[2:])
                with _bound(family, place, socket.SO_REUSEADDR) as alone:  # whoever shares the port is somebody else
                    taken = alone.getsockname()[1]
                place = (address[0], taken, *address[2:])
                reservations.enter_context(_bound(family, place, socket.SO_REUSEPORT))
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CannotStart(f"can't listen on {host}:{port}, server.port: {reason}") from error
        yield taken


def _bound(family: int, place: tuple[Any, ...], option: int) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, option, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # as those that will listen
        bound.bind(place)
    except BaseException:
        bound.close()
        raise
    return bound
