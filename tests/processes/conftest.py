"""Signals are heard, also where the tests run in the background of a shell that ignores some."""

import signal

import pytest


@pytest.fixture(autouse=True, scope="session")
def signals_are_heard():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)
