"""`segtrain report --follow`: a real client against the server, as a run's files grow."""

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest

from segtrain import cli
from segtrain.errors import UserError
from segtrain.report import live as module

pytest.importorskip("plotly")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SECONDS = 0.05


def step(number):
    return json.dumps({"event": "train", "step": number, "loss": 1 / number}) + "\n"


def hold(run, pid=None, host=None):
    content = {"pid": pid or os.getpid(), "host": host or socket.gethostname()}
    (run / ".lock").write_text(json.dumps(content))


@pytest.fixture
def run(tmp_path):
    """A run that goes on: this process counts as the one that trains."""
    path = tmp_path / "my-run"
    path.mkdir()
    (path / "recipe.yaml").write_text("model: m\n")
    (path / "metrics.jsonl").write_text(step(1))
    hold(path)
    return path


class Follower:
    """`follow` in a thread; `port` once it listens."""

    def __init__(self, run, seconds=SECONDS):
        self.said, self._listens = [], threading.Event()
        self.thread = threading.Thread(target=module.follow, args=(run, 0, self._say, seconds), daemon=True)
        self.thread.start()
        assert self._listens.wait(20)
        self.port = int(self.said[0].split("/")[2].split(":")[1])

    def _say(self, text):
        self.said.append(text)
        self._listens.set()

    def ask(self, path="/", method="GET", host=None, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        headers = {"Host": f"127.0.0.1:{self.port}" if host is None else host.format(port=self.port)}
        connection.request(method, path, body=body, headers=headers)
        answer = connection.getresponse()
        content = answer.read().decode()
        connection.close()
        return answer, content

    def status(self, *arguments, **more):
        return self.ask(*arguments, **more)[0].status

    def wait_for(self, text):
        until = time.monotonic() + 20
        while text not in self.ask()[1]:
            assert time.monotonic() < until, text
            time.sleep(SECONDS)


@pytest.fixture
def follower(run):
    found = Follower(run)
    yield found
    (run / ".lock").unlink(missing_ok=True)
    found.thread.join(20)
    assert not found.thread.is_alive()


def test_200_requests_while_the_run_grows(run, monkeypatch):
    """The run's bytes are those that it wrote itself, and the page is made once a look at most."""
    renders, looks, look = [], [], module.Live.look
    monkeypatch.setattr(module, "render", lambda path: renders.append(1) or f"<body>{len(renders)}</body>")
    monkeypatch.setattr(module.Live, "look", lambda self: looks.append(1) or look(self))
    follower = Follower(run, seconds=0.2)
    expected = {path.name: path.read_bytes() for path in run.iterdir()}
    for number in range(2, 202):
        with open(run / "metrics.jsonl", "a") as file:
            file.write(step(number))
        expected["metrics.jsonl"] += step(number).encode()
        assert follower.status("/" if number % 2 else "/version") == 200
    assert 1 <= len(renders) <= len(looks) < 100
    assert {path.name: path.read_bytes() for path in run.iterdir()} == expected
    (run / ".lock").unlink()
    follower.thread.join(20)


def test_the_page_keeps_up(run, follower):
    answer, first = follower.ask()
    assert answer.getheader("Cache-Control") == "no-store"
    assert "step 1<" in first
    version = follower.ask("/version")[1]
    assert f'data-version="{version}"' in first
    assert "connect-src 'self'" in first
    assert "{{seconds}}" not in first
    with open(run / "metrics.jsonl", "a") as file:
        file.write(step(2))
    follower.wait_for("step 2<")
    assert follower.ask("/version")[1] != version


def test_head_has_no_body(follower):
    answer, content = follower.ask(method="HEAD")
    assert answer.status == 200
    assert int(answer.getheader("Content-Length")) > 0
    assert content == ""


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:{port}.evil.example", ""]
)
def test_a_foreign_host_is_refused(follower, host):
    for method in ("GET", "POST"):
        assert follower.status(method=method, host=host) == 403


def test_localhost_is_this_machine(follower):
    assert follower.status(host="localhost:{port}") == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "ODD"])
def test_other_methods_are_refused(follower, method):
    assert follower.status(method=method, body=None if method == "TRACE" else "x") == 405


@pytest.mark.parametrize(
    "path", ["/../my-run/recipe.yaml", "/recipe.yaml", "/%2e%2e/recipe.yaml", "//etc/passwd", "/etc/passwd", "/?x"]
)
def test_other_paths_are_not_found(follower, path):
    answer, content = follower.ask(path)
    assert answer.status == 404
    assert "model: m" not in content


def test_only_this_machine_is_listened_to(run):
    with module._listen(module.Live(run, SECONDS), 0) as server:
        assert server.server_address[0] == "127.0.0.1"


def test_it_ends_with_the_run_and_shows_its_last_state(run):
    follower = Follower(run, seconds=0.5)
    with open(run / "metrics.jsonl", "a") as file:
        file.write(step(2))
    (run / ".lock").unlink()
    until = time.monotonic() + 20
    while not follower.ask("/version")[1].endswith("-ended"):
        assert time.monotonic() < until
    assert "step 2<" in follower.ask()[1]
    follower.thread.join(20)
    assert not follower.thread.is_alive()
    assert "has ended" in follower.said[-1]
    with pytest.raises(ConnectionRefusedError):
        follower.ask()


def test_it_waits_for_a_run_that_has_not_begun(tmp_path):
    run = tmp_path / "later"
    follower = Follower(run)
    assert "nothing to show of this run yet" in follower.ask()[1]
    assert f"waiting for the first metrics of {run}" in follower.said
    run.mkdir()
    hold(run)
    (run / "metrics.jsonl").write_text(step(1))
    follower.wait_for("step 1<")
    (run / ".lock").unlink()
    follower.thread.join(20)
    assert not follower.thread.is_alive()


def test_who_holds_the_lock(run):
    assert module.is_going(run)
    hold(run, pid=2**22 + 1)  # above the highest that Linux or macOS gives
    assert not module.is_going(run)
    hold(run, pid=2**22 + 1, host="another-host")
    assert module.is_going(run)
    (run / ".lock").write_text("")
    assert module.is_going(run)
    (run / ".lock").unlink()
    assert not module.is_going(run)


def test_a_finished_run_is_not_followed(run, capsys):
    (run / ".lock").unlink()
    assert cli.run(["report", str(run), "--follow"]) == 2
    assert "no run is going on" in capsys.readouterr().err


def test_a_port_in_use_is_named(run, follower):
    with pytest.raises(UserError, match=f"port {follower.port} can't be used"):
        module.follow(run, follower.port, print)


def test_a_port_alone_is_refused(run, capsys):
    assert cli.run(["report", str(run), "--port", "8000"]) == 2
    assert "--port goes with --follow" in capsys.readouterr().err


def test_without_plotly_the_error_names_the_extra(run, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "plotly" or name == "segtrain.report.charts"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(UserError, match="segtrain report needs plotly"):
        module.follow(run, 0, print)


def test_ctrl_c_ends_it_quietly(run, monkeypatch, capsys):
    def interrupt(self, say):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.Live, "watch", interrupt)
    assert cli.run(["report", str(run), "--follow"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("http://127.0.0.1:")
    assert err == ""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH")
@pytest.mark.parametrize("grows", [True, False])
def test_a_browser_puts_new_figures_in_place(run, monkeypatch, grows):
    """The run's second step is written once the browser has the page of the first."""
    page = module.Live.page

    def and_then_grow(self):
        content = page(self)
        if grows and b"step 1<" in content:
            with open(run / "metrics.jsonl", "a") as file:
                file.write(step(2))
            self.look()
        return content

    monkeypatch.setattr(module.Live, "page", and_then_grow)
    follower = Follower(run, seconds=1.0)
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    command += ["--virtual-time-budget=20000", f"http://127.0.0.1:{follower.port}/"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    (run / ".lock").unlink()
    follower.thread.join(20)
    assert "CONSOLE" not in done.stderr
    assert 'data-charts="drawn"' in done.stdout
    assert ("step 2<" in done.stdout, "step 1<" in done.stdout) == (grows, not grows)
    assert 'class="main-svg"' in done.stdout
