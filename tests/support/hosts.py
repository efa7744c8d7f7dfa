"""Hosts of a network on this machine, and tables of names that they may have."""

import pytest

from examples.soak.hosts import all_names, can_make_hosts, network

__all__ = ["all_names", "debian_names", "needs_hosts", "network", "no_names"]

needs_hosts = pytest.mark.skipif(not can_make_hosts(), reason="needs root, for network namespaces")


def debian_names(hosts, host):
    """As Debian writes them: the own name of a host leads to a loopback address."""
    own = hosts.name(host)
    others = all_names(hosts, host)
    return [f"127.0.1.1 {own}", *(line for line in others if not line.endswith(f" {own}"))]


def no_names(hosts, host):
    """No name is known, not even the own one."""
    return []
