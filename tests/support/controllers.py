"""A steward that listens, and its processes as threads of a test would see them: lines to it."""

import os
import time

from ftmesh.elastic.controller import Steward
from ftmesh.elastic.heartbeats import Deadlines
from ftmesh.elastic.member import Member
from ftmesh.elastic.rpc import ChannelClosed, Listener, connect

SECRET = "5ec2e7"
SOON = 10.0  # seconds for what takes none


class Line:
    """The other end of a process's line."""

    def __init__(self, address, process, *, start=1, epoch=1, pid=None):
        self.process, self.epoch = process, epoch
        self.channel = connect(address, SECRET, timeout=SOON)
        self.channel.send({"hello": process, "pid": pid or os.getpid(), "start": start})

    def say(self, data=b"", *, epoch=None, **message):
        self.channel.send({"epoch": epoch or self.epoch, **message}, data)

    def hear(self, *keys):
        """The next message, which has these keys; their values."""
        found = self.channel.receive(SOON)
        assert found is not None, "nothing was said"
        message, _ = found
        assert set(keys) <= set(message), message
        return tuple(message[key] for key in keys)

    def has_nothing_to_hear(self):
        """What was said before is heard by now: a note that is looked for comes back first."""
        self.say(call=999, do="look", key="none")
        return self.hear("reply") == (999,)

    def is_closed(self):
        try:
            while self.channel.receive(SOON) is not None:
                pass
        except ChannelClosed:
            return True
        finally:
            self.channel.close()
        return False


class Stewarded:
    """A steward with some processes, of which `lines` are those that have come."""

    def __init__(self, hosts=4, *, limit=0.1, start=1, given=None, **options):
        self.events, self.stopped = [], []
        self.deadlines = Deadlines(limit, given or {})
        self.steward = Steward(
            [Member(number, 10 + number, f"2x2@{2 * number},0") for number in range(hosts)],
            epoch=start,
            deadlines=self.deadlines,
            say=lambda event, **facts: self.events.append({"event": event, **facts}),
            stop=self.stopped.append,
            **options,
        )
        self.start = start
        self.listener = Listener(self.steward.serve, secret=SECRET)
        self.lines = {}

    def come(self, *processes):
        """Have processes come, all where none are named."""
        for process in processes or self.steward.everyone:
            line = Line(self.listener.address, process, start=self.start, epoch=self.start)
            assert line.hear("welcome", "masked") == (self.steward.epoch, self.steward.masked)
            self.lines[process] = line
        return self

    def joined(self, step=0, *, processes=None, **facts):
        """Have processes join the epoch, from the state after a step."""
        for process in self.lines if processes is None else processes:
            self.lines[process].say(joined=step, **facts)
        wait_until(lambda: not processes or self.steward.committed == step)
        return self.settled()

    def settled(self):
        """All that was said has been heard."""
        for line in self.lines.values():
            assert line.has_nothing_to_hear()
        return self

    def commit(self, step, then="go on"):
        """Have all vote for a step, and hear that it is committed."""
        for line in self.lines.values():
            line.say(ready=step)
        for line in self.lines.values():
            assert line.hear("commit", "then") == (step, then)

    def lose(self, process, how="ended by SIGKILL", status=137):
        """A process ends; the others hear of the epoch, and are in it; what they hear."""
        line = self.lines.pop(process)
        self.steward.ended(process, how, status)
        line.channel.close()
        return self.heard_of_epoch()

    def heard_of_epoch(self):
        heard = {}
        for number, line in self.lines.items():
            heard[number] = line.hear("epoch", "members", "masked", "committed", "why")
            line.epoch = heard[number][0]
        (told,) = set(map(str, heard.values()))  # all hear the same
        assert told
        return next(iter(heard.values()))

    def tick_until(self, is_so):
        until = time.monotonic() + SOON
        while not is_so():
            assert time.monotonic() < until, "time is up"
            self.steward.tick()
            time.sleep(0.01)

    def of(self, event):
        return [each for each in self.events if each["event"] == event]

    def close(self):
        for line in self.lines.values():
            line.channel.close()
        self.listener.close()


def wait_until(is_so):
    until = time.monotonic() + SOON
    while not is_so():
        assert time.monotonic() < until, "time is up"
        time.sleep(0.005)
