"""Hub ids without network: one attempt, one sentence, exit code 2. The "hub" is a socket of this machine."""

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from huggingface_hub import constants

from segtrain import hub
from segtrain.data import arrow
from segtrain.data.tokenizer import load_tokenizer
from segtrain.errors import UserError
from segtrain.memory import source
from segtrain.models.load import load


class _NotFound(BaseHTTPRequestHandler):
    asked = 0

    def do_HEAD(self) -> None:
        type(self).asked += 1
        self.send_error(404)

    do_GET = do_HEAD

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens at the hub's address."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")


@pytest.fixture
def silent_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A connection is made and nothing ever comes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(hub, "PATIENCE", 0.3)
        yield


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that has nothing, but answers."""
    server = HTTPServer(("127.0.0.1", 0), _NotFound)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    _NotFound.asked = 0
    yield
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("network", ["no_network", "silent_network"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_without_network(request: pytest.FixtureRequest, network: str, streaming: bool) -> None:
    request.getfixturevalue(network)
    import datasets  # noqa: F401 (it takes a while)

    begun = time.monotonic()
    with pytest.raises(UserError, match=r"hub can't be reached.*local path.*dataset owner/no-such-data") as error:
        arrow.hub("owner/no-such-data", None, None, streaming)
    assert time.monotonic() - begun < 10  # the hub library's own retries take 23 s
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("network", ["no_network", "silent_network"])
def test_a_model_without_network(request: pytest.FixtureRequest, network: str) -> None:
    request.getfixturevalue(network)
    begun = time.monotonic()
    with pytest.raises(UserError, match=r"owner/no-such-model.*hub can't be reached.*give a local path"):
        load("owner/no-such-model")
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("network", ["no_network", "silent_network"])
@pytest.mark.parametrize("read", [load_tokenizer, source.find], ids=["tokenizer", "config.json"])
def test_a_part_of_a_model_without_network(request: pytest.FixtureRequest, network: str, read: Any) -> None:
    """As `check` and `plan-segments` read it."""
    request.getfixturevalue(network)
    begun = time.monotonic()
    with pytest.raises(UserError, match=r"owner/no-such-model.*hub can't be reached.*give a local path"):
        read("owner/no-such-model")
    assert time.monotonic() - begun < 10


def test_offline_by_request_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        load("owner/no-such-model")


def test_the_setting_is_put_back(no_network: None) -> None:
    from datasets import config

    before = config.HF_HUB_OFFLINE
    with hub.hub() as reason:
        assert reason
        assert constants.HF_HUB_OFFLINE
    assert not constants.HF_HUB_OFFLINE
    with pytest.raises(UserError):
        arrow.hub("owner/no-such-data", None, None, False)
    assert before == config.HF_HUB_OFFLINE


def test_an_answer_is_an_answer_whatever_it_says(answering: None) -> None:
    """Then the hub library goes on alone, with its own retries."""
    with hub.hub() as reason:
        assert not reason
        assert not constants.HF_HUB_OFFLINE
    assert _NotFound.asked == 1


def test_a_cached_model_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: None) -> None:
    """The cache as the hub library lays it out, without the listing that only newer versions keep."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    home = tmp_path / "models--owner--tiny"
    tiny_run.model(home / "snapshots" / ("a" * 40))
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("a" * 40)
    assert load("owner/tiny").config["model_type"] == "llama"
