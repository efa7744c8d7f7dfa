"""A pod in threads: a real coordination service, and a client of it for every process."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from jax._src.lib import _jax

from ftmesh.distributed.kv_client import Board
from ftmesh.distributed.process_group import Cluster
from ftmesh.elastic.pod_environment import free_port


@contextmanager
def pod(num_processes, limit=20.0):
    """The clusters of so many processes, in order."""
    address = f"127.0.0.1:{free_port()}"
    service = _jax.get_distributed_runtime_service(address, num_processes)
    clients = [
        _jax.get_distributed_runtime_client(address, process) for process in range(num_processes)
    ]
    with ThreadPoolExecutor(num_processes) as threads:
        list(threads.map(lambda client: client.connect(), clients))
        everyone = tuple(range(num_processes))
        yield [
            Cluster(process, num_processes, limit, everyone, 0, None, Board(client))
            for process, client in enumerate(clients)
        ]
        list(threads.map(lambda client: client.shutdown(), clients))
    service.shutdown()


def at_once(function, clusters):
    """What `function` gives in every process, or the error that it raises there."""

    def caught(cluster):
        try:
            return function(cluster)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(clusters)) as threads:
        return list(threads.map(caught, clusters))
