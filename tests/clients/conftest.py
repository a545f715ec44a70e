"""The real server with the demo model, started once for all tests."""

import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
import openai
import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = "deepseek-v4-flash"


def pytest_addoption(parser):
    parser.addoption("--flashd", default=str(ROOT / "target/release/flashd"), help="the binary to test")
    parser.addoption("--full", action="store_true", help="run the longer versions")


class Server:
    """A running `flashd serve`; its log is kept for failures."""

    def __init__(self, binary, log, *args):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.log_path = f"http://127.0.0.1:{port}", log
        command = [binary, "serve", "--host", "127.0.0.1", "--port", str(port), *args]
        with open(log, "wb") as output:
            # Settings of the surrounding shell must not reach the server.
            env = {k: v for k, v in os.environ.items() if not k.startswith(("FLASHD_", "VLLM_"))}
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env)
        self.wait_until_ready()

    def wait_until_ready(self, seconds=60):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                pytest.fail(f"flashd ended with {self.process.returncode}:\n{self.log()}")
            try:
                if httpx.get(f"{self.url}/readyz", timeout=1).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        pytest.fail(f"flashd is not ready after {seconds} s:\n{self.log()}")

    def log(self):
        return Path(self.log_path).read_text(errors="replace")

    def client(self, **options):
        options = dict(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120) | options
        return openai.OpenAI(**options)

    def metrics(self):
        """{name{labels}: value} of every sample."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        samples = re.findall(r"^([a-zA-Z_:][\w:]*(?:\{.*\})?) (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in samples}

    def metric(self, name):
        """The sum of a metric over its labels."""
        return sum(value for key, value in self.metrics().items() if key.split("{")[0] == name)

    def stop(self):
        """SIGTERM; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail(f"flashd did not end within 30 s of SIGTERM:\n{self.log()}")


@pytest.fixture(scope="session")
def start(request, tmp_path_factory):
    """Starts more servers; those still running are stopped at the end."""
    servers = []

    def start(*args):
        log = tmp_path_factory.mktemp("server") / "log"
        servers.append(Server(request.config.getoption("--flashd"), log, *args))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def server(start):
    return start()


@pytest.fixture(scope="session")
def client(server):
    return server.client()


@pytest.fixture
def ask(client):
    """One user message, greedily; keyword arguments go into the request."""

    def ask(text, **options):
        messages = [{"role": "user", "content": text}]
        return client.chat.completions.create(model=MODEL, messages=messages, **(dict(temperature=0) | options))

    return ask
