"""A model by hub id: the catalog, then the cache, then the hub, here a server on the loopback address."""

import json
import threading
import time
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from peakcast import catalog
from peakcast.core.errors import CatalogError, SpecError
from peakcast.dialects.common import hub
from peakcast.dialects.common.job_file import resolve_architecture
from peakcast.dialects.common.text import no_files

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 32,
}  # fmt: skip


ASKED: list[str] = []


class Hub(BaseHTTPRequestHandler):
    asked = ASKED

    def do_GET(self):
        self.asked.append(self.path)
        name = self.path.split("/")[2].replace("llama-3.1-8", "gone")
        if name == "gone" or (name == "lora" and self.path.endswith("/config.json")):
            self.send_error(404)
        elif name == "gated" and self.headers["Authorization"] != "Bearer good":
            self.send_error(403 if self.headers["Authorization"] else 401)
        elif name == "away":
            self.send_response(307)
            self.send_header("Location", "/some/gated/resolve/main/config.json")
            self.end_headers()
        elif name == "moved":
            self.send_response(307)
            self.send_header("Location", "/some/tiny/resolve/main/config.json")
            self.end_headers()
        elif name == "slow":
            time.sleep(0.4)
        else:
            body = {
                "tiny": json.dumps(CONFIG),
                "lora": json.dumps({"peft_type": "LORA", "base_model_name_or_path": "some/tiny"}),
                "gated": json.dumps(CONFIG),
                "big": " " * (hub.MAX_BYTES + 2),
                "list": "[]",
                "html": "<html>",
            }[name]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch, tmp_path):
    served = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=served.serve_forever, args=(0.01,), daemon=True).start()  # else it ends half a second late
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{served.server_port}/")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hub, "TIMEOUT_SECONDS", 0.2)
    hub._fetched.cache_clear()
    ASKED.clear()
    yield served
    served.shutdown()
    served.server_close()


def test_a_hub_id_is_fetched_once(server):
    architecture = resolve_architecture("some/tiny")
    assert (architecture.name, architecture.hidden_size, architecture.num_hidden_layers) == ("some/tiny", 64, 2)
    assert resolve_architecture("some/tiny") == architecture
    assert ASKED == ["/some/tiny/resolve/main/config.json"]
    assert resolve_architecture("some/moved").hidden_size == 64


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("some/gone", "there is no such model"),
        ("some/gated", "it is not there, or is gated or private. Accept its licence on http://127.0.0.1"),
        ("some/slow", "cannot be reached"),
        ("some/big", "larger than"),
        ("some/list", "is no mapping"),
    ],
)
def test_what_the_hub_does_not_give_is_said_with_the_way_out(server, name, says):
    begun = time.monotonic()
    with pytest.raises(CatalogError) as caught:
        resolve_architecture(name)
    assert says in caught.value.message
    assert "config.json instead: by its path (--model" in caught.value.message
    assert time.monotonic() - begun < 3


def test_an_answer_that_is_no_json_is_refused(server):
    with pytest.raises(SpecError, match="is not valid JSON"):
        resolve_architecture("some/html")


def test_offline_is_said_clearly(server, monkeypatch):
    server.shutdown()
    server.server_close()
    with pytest.raises(CatalogError, match="cannot be reached"):
        resolve_architecture("some/tiny")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CatalogError, match="HF_HUB_OFFLINE is set, so the hub is not asked"):
        resolve_architecture("some/other")


def test_an_adapter_is_no_network_and_its_base_model_is_named(server, tmp_path):
    adapter = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "some/tiny", "r": 8})
    folder = tmp_path / "home" / "hub" / "models--some--adapter" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(adapter)
    (folder / "config.json").write_text(json.dumps(CONFIG))  # TRL writes the base model's beside it
    for name in ("some/adapter", str(folder), str(folder / "adapter_config.json"), "some/lora"):
        with pytest.raises(SpecError, match=r"is an adapter of peft .* give its base model, 'some/tiny'"):
            resolve_architecture(name)
    assert ASKED == ["/some/lora/resolve/main/config.json", "/some/lora/resolve/main/adapter_config.json"]


def test_the_cache_comes_before_the_hub(server, monkeypatch, tmp_path):
    for home in (tmp_path / "home" / "hub", tmp_path / "cache"):
        folder = home / "models--some--cached" / "snapshots" / "abc"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 32}))
        assert resolve_architecture("some/cached").hidden_size == 32
        assert ASKED == []
        (folder / "config.json").unlink()
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))


def test_the_catalog_comes_first(server):
    assert resolve_architecture("meta-llama/Llama-3.1-8B") == catalog.architecture("llama-3.1-8b")
    assert resolve_architecture("TheBloke/Llama-2-70B-GPTQ") == catalog.architecture("llama-2-70b")
    assert ASKED == []


def test_only_owner_and_name_are_asked_for(server):
    for name in ("llama-3.1-8", "a/b/c", "../etc/passwd", "some/../x", "http://x/y", ""):
        with pytest.raises(CatalogError):
            resolve_architecture(name)
    assert ASKED == []


def test_a_slip_in_a_known_id_gets_its_near_misses(server):
    with pytest.raises(CatalogError, match=r"Did you mean 'llama-3\.1-8b'"):
        resolve_architecture("gone/llama-3.1-8")


def test_a_folder_or_its_config_is_a_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert resolve_architecture(str(tmp_path)) == resolve_architecture(str(tmp_path / "config.json"))
    assert resolve_architecture(str(tmp_path)).name == Path(tmp_path).name


def test_every_architecture_of_the_catalog_has_its_hub_id():
    text = Path(catalog.__file__).with_name("aliases.toml").read_text(encoding="utf-8")
    aliases = tomllib.loads(text)
    without = {name for name in catalog.architecture_names() if not any("/" in alias for alias in aliases.get(name, ()))}
    # the ids of these stand for models with a vision tower; the catalog has their text part
    assert without == {"gemma-3-4b", "gemma-3-12b"}


def test_a_gated_model_is_opened_by_the_users_token(server, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "good")
    assert resolve_architecture("some/tiny").hidden_size == 64
    assert resolve_architecture("some/gated").hidden_size == 64
    with pytest.raises(CatalogError, match="gated"):  # the token goes to no address that the hub redirects to
        resolve_architecture("some/away")


@pytest.mark.parametrize(
    ("token", "says"),
    [
        (
            "bad",
            r"it is gated: its licence must be accepted first. Accept .* the account of your token, which does not open it",
        ),
        (None, r"log in \(hf auth login, or HF_TOKEN\)"),
    ],
)
def test_a_token_that_does_not_open_a_model_is_said(server, monkeypatch, token, says):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token)
    with pytest.raises(CatalogError, match=says):
        resolve_architecture("some/gated")


def test_somebody_elses_question_uses_no_token(server, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "good")
    with no_files(), pytest.raises(CatalogError, match=r"Accept its licence on .* and give its config.json"):
        resolve_architecture("some/gated")
