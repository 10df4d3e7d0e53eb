"""On which of a machine's interfaces process 0 listens for the others."""

import contextlib
import ipaddress
import socket


def listen_on(address: str) -> str | None:
    """The address that process 0 binds to: the one that the others know, and no other.

    Whoever reaches the coordinator can take part in the run: it asks for no password.

    Args:
      address: host:port, as all processes know it.
    Returns:
      ip:port; None where that is not known here, so all interfaces are needed: the name means this machine
      itself here, and something else to the others (127.0.1.1 in Debian's /etc/hosts), or the address is that
      of a gateway.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        family, _, _, _, place = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except OSError:
        return None
    ip, is_told = str(place[0]), host == "localhost"
    with contextlib.suppress(ValueError):
        is_told |= ipaddress.ip_address(host).is_loopback
    if ipaddress.ip_address(ip.partition("%")[0]).is_loopback and not is_told:
        return None
    try:
        with socket.socket(family) as probe:
            probe.bind((ip, 0))
    except OSError:  # of another machine
        return None
    return f"[{ip}]:{port}" if family == socket.AF_INET6 else f"{ip}:{port}"
