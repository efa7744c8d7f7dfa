"""A process that runs JAX's coordination service, apart from all that train.

    python service.py 127.0.0.1:8476 4

It is run by path and imports jaxlib alone, so that it starts within a second. It says when it is
up, and ends when its standard input closes.
"""

import sys

HEARTBEAT = 100  # seconds; who is there is decided by others, who know sooner
SHUTDOWN = 5  # seconds for processes to let go of it


def main() -> None:
    """Serve until the end of stdin."""
    from jaxlib import _jax

    address, number = sys.argv[1], int(sys.argv[2])
    service = _jax.get_distributed_runtime_service(
        address,
        number,
        heartbeat_timeout=HEARTBEAT,
        shutdown_timeout=SHUTDOWN,
        recoverable=True,
    )
    print("up", flush=True)
    sys.stdin.read()
    service.shutdown()


if __name__ == "__main__":
    main()
