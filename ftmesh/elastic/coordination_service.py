"""A program that runs JAX's coordination service, so that no worker has to.

    python coordination_service.py 127.0.0.1:8476 4

It is run by path and imports only jaxlib, so it starts within a second. It prints a line when it is
up, and exits when its stdin closes.
"""

import sys

HEARTBEAT_SECONDS = 100  # the controller notices lost workers long before
SHUTDOWN_SECONDS = 5  # for workers to disconnect


def main() -> None:
    """Run the service until stdin closes."""
    from jaxlib import _jax

    address, num_processes = sys.argv[1], int(sys.argv[2])
    service = _jax.get_distributed_runtime_service(
        address,
        num_processes,
        heartbeat_timeout=HEARTBEAT_SECONDS,
        shutdown_timeout=SHUTDOWN_SECONDS,
        recoverable=True,
    )
    print("up", flush=True)
    sys.stdin.read()
    service.shutdown()


if __name__ == "__main__":
    main()
