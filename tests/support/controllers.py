"""A controller that listens, and workers that a test plays over real connections."""

import os
import time

from ftmesh.elastic.controller import Controller
from ftmesh.elastic.heartbeats import Member, ProgressMonitor
from ftmesh.elastic.rpc import ChannelClosed, Listener, connect

SECRET = "5ec2e7"
TIMEOUT = 10.0  # seconds for what should take none


class FakeWorker:
    """A worker's end of the control connection."""

    def __init__(self, address, process, *, start=1, generation=1, pid=None):
        self.process, self.generation = process, generation
        self.channel = connect(address, SECRET, timeout=TIMEOUT)
        self.channel.send({"hello": process, "pid": pid or os.getpid(), "start": start})

    def send(self, data=b"", *, generation=None, **message):
        self.channel.send({"generation": generation or self.generation, **message}, data)

    def receive(self, *keys):
        """The values of `keys` in the next message, which must have them."""
        frame = self.channel.receive(TIMEOUT)
        assert frame is not None, "no message came"
        message, _ = frame
        assert set(keys) <= set(message), message
        return tuple(message[key] for key in keys)

    def has_no_messages(self):
        """True if the reply to a request is the next message: earlier ones are handled by then."""
        self.send(call=999, operation="try_get", key="none")
        return self.receive("reply") == (999,)

    def is_closed(self):
        try:
            while self.channel.receive(TIMEOUT) is not None:
                pass
        except ChannelClosed:
            return True
        finally:
            self.channel.close()
        return False


class ControllerHarness:
    """A controller with some workers; `workers` are those that have connected."""

    def __init__(self, hosts=4, *, collective_timeout=0.1, start=1, phase_timeouts=None, **options):
        self.events, self.killed = [], []
        self.monitor = ProgressMonitor(collective_timeout, phase_timeouts or {})
        self.controller = Controller(
            [Member(process, 10 + process, f"2x2@{2 * process},0") for process in range(hosts)],
            generation=start,
            monitor=self.monitor,
            log_event=lambda event, **facts: self.events.append({"event": event, **facts}),
            kill=self.killed.append,
            **options,
        )
        self.start = start
        self.listener = Listener(self.controller.serve, secret=SECRET)
        self.workers = {}

    def connect(self, *processes):
        """Connect the given workers, or all of them."""
        for process in processes or self.controller.started:
            worker = FakeWorker(
                self.listener.address, process, start=self.start, generation=self.start
            )
            welcome = worker.receive("welcome", "quarantined")
            assert welcome == (self.controller.generation, self.controller.quarantined)
            self.workers[process] = worker
        return self

    def join(self, step=0, *, processes=None, **facts):
        """Have workers join the generation from the state after `step`."""
        for process in self.workers if processes is None else processes:
            self.workers[process].send(joined=step, **facts)
        wait_until(lambda: not processes or self.controller.committed == step)
        return self.settle()

    def settle(self):
        """Return once all messages of the workers are handled."""
        for worker in self.workers.values():
            assert worker.has_no_messages()
        return self

    def commit(self, step, then="go on"):
        """Have all workers vote for a step and receive its commit."""
        for worker in self.workers.values():
            worker.send(ready=step)
        for worker in self.workers.values():
            assert worker.receive("commit", "then") == (step, then)

    def lose(self, process, how="ended by SIGKILL", status=137):
        """End a worker; the others enter the new generation, which is returned."""
        worker = self.workers.pop(process)
        self.controller.process_ended(process, how, status)
        worker.channel.close()
        return self.receive_generation()

    def receive_generation(self):
        """Have all workers enter the next generation; return its message, the same for all."""
        messages = []
        for worker in self.workers.values():
            keys = ("generation", "members", "quarantined", "committed", "reason")
            messages.append(worker.receive(*keys))
            worker.generation = messages[-1][0]
        assert all(message == messages[0] for message in messages)
        return messages[0]

    def poll_until(self, condition):
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            assert time.monotonic() < deadline, "the timeout is over"
            self.controller.poll()
            time.sleep(0.01)

    def events_named(self, name):
        return [event for event in self.events if event["event"] == name]

    def close(self):
        for worker in self.workers.values():
            worker.channel.close()
        self.listener.close()


def wait_until(condition):
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "the timeout is over"
        time.sleep(0.005)
