"""A headless browser, driven over a pipe with the DevTools protocol.

Messages are JSON, ended by a zero byte, on file descriptors 3 and 4 of the browser.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
TIMEOUT = 60  # seconds for a response


def find_browser():
    """Return the path of an installed browser, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A browser with one page; `errors` has its warnings, errors and exceptions."""

    def __init__(self, folder, *, size=(1280, 900)):
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        options = [
            "--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-extensions", "--hide-scrollbars",
            "--disable-dev-shm-usage", f"--user-data-dir={folder}",
            f"--window-size={size[0]},{size[1]}",
        ]  # fmt: skip
        if os.geteuid() == 0:
            options.append("--no-sandbox")  # not available to root
        ends = (to_browser, from_browser)
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                'exec "${@:3}" 3<&$1 4>&$2',
                "bash",
                *map(str, ends),
                find_browser(),
                *options,
            ],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in ends:
            os.close(end)
        self._number, self._left, self._session = 0, b"", None
        self.errors = []
        try:
            self._attach()
            self.resize(*size)
        except BaseException:
            self.close()
            raise

    def _attach(self):
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def close(self):
        self._process.terminate()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def _receive(self):
        until = time.monotonic() + TIMEOUT
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._read], [], [], max(0, until - time.monotonic()))
            part = os.read(self._read, 1 << 20) if ready else b""
            if not part:
                raise TimeoutError("the browser does not respond, or has exited")
            self._left += part
        message, _, self._left = self._left.partition(b"\0")
        return json.loads(message)

    def _call(self, method, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._handle_event(answer)

    def _handle_event(self, event):
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(params["args"])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"])

    def open(self, address):
        self._call("Page.navigate", url=address)
        self.wait("window.ftmesh && ftmesh.state().rounds > 0")

    def evaluate(self, code):
        """Return the value of a JavaScript expression."""
        found = self._call("Runtime.evaluate", expression=code, returnByValue=True)
        if "exceptionDetails" in found:
            raise AssertionError(f"{code}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait(self, code, seconds=TIMEOUT):
        """Wait until a JavaScript expression is true."""
        until = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({code})"):
            assert time.monotonic() < until, f"not after {seconds} s: {code}"
            time.sleep(0.02)

    def state(self):
        return self.evaluate("ftmesh.state()")

    def text(self, selector):
        return self.evaluate(f"document.querySelector({selector!r}).innerText")

    def click(self, x, y):
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def click_chip(self, *coord):
        self.click(*self.evaluate(f"ftmesh.chip({', '.join(map(str, coord))})"))

    def click_link(self, a, b):
        self.click(*self.evaluate(f"ftmesh.link({[*a]}, {[*b]})"))

    def click_on(self, selector):
        box = f"document.querySelector({selector!r}).getBoundingClientRect()"
        self.evaluate(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        self.click(
            *self.evaluate(f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({box})")
        )

    def press(self, key, shift=False):
        code = 8 * shift
        text = {"text": key} if len(key) == 1 else {}
        names = {"ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "ArrowUp": 38, " ": 32}
        number = {"windowsVirtualKeyCode": names.get(key, 0)}
        for kind in ("keyDown", "keyUp"):
            extra = text if kind == "keyDown" else {}
            self._call(
                "Input.dispatchKeyEvent", type=kind, key=key, modifiers=code, **number, **extra
            )

    def resize(self, width, height):
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    def dark(self, is_dark=True):
        feature = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path):
        """Write a screenshot as PNG."""
        shot = self._call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))
