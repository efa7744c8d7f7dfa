"""A process group in threads: a real coordination service, and a client of it per process."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from jax._src.lib import _jax

from ftmesh.distributed.kv_store import KvClient
from ftmesh.distributed.process_group import ProcessGroup
from ftmesh.elastic.rpc import free_port


@contextmanager
def process_groups(num_processes, timeout=20.0):
    """The group as each of `num_processes` processes sees it."""
    address = f"127.0.0.1:{free_port()}"
    service = _jax.get_distributed_runtime_service(address, num_processes)
    clients = [
        _jax.get_distributed_runtime_client(address, process) for process in range(num_processes)
    ]
    with ThreadPoolExecutor(num_processes) as threads:
        list(threads.map(lambda client: client.connect(), clients))
        members = tuple(range(num_processes))
        yield [
            ProcessGroup(process, num_processes, timeout, members, kv=KvClient(client))
            for process, client in enumerate(clients)
        ]
        list(threads.map(lambda client: client.shutdown(), clients))
    service.shutdown()


def run_in_all(function, groups):
    """What `function` returns in every process, or the error that it raises there."""

    def run(group):
        try:
            return function(group)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(run, groups))
