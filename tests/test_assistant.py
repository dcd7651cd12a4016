"""`peakcast mcp`, asked as an assistant asks it: a process of its own, over its standard input and output, by the
protocol's lines."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from peakcast import api

pytestmark = pytest.mark.needs("mcp")
SERVER = [sys.executable, "-P", "-m", "peakcast", "mcp"]
JOB = {"architecture": "llama-3.2-1b", "sequence_length": 1024, "activation_checkpointing": {"mode": "full"}}


class Wire:
    """JSON-RPC over the pipes of a server: a line each way."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._in: IO[str] = process.stdin
        self._out: IO[str] = process.stdout
        self._number = 0

    def tell(self, method: str) -> None:
        self._in.write(json.dumps({"jsonrpc": "2.0", "method": method}) + "\n")
        self._in.flush()

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        asked = {"jsonrpc": "2.0", "id": self._number, "method": method, "params": params}
        self._in.write(json.dumps(asked) + "\n")
        self._in.flush()
        answer = json.loads(self._out.readline())
        assert answer["id"] == self._number
        result: dict[str, Any] = answer["result"]
        return result

    def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        return self.ask("tools/call", name=tool, arguments=arguments)


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    with subprocess.Popen(SERVER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        found = Wire(process)
        client = {"name": "test", "version": "1"}
        hello = found.ask("initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo=client)
        assert hello["serverInfo"]["name"] == "peakcast"
        found.tell("notifications/initialized")
        yield found
        process.stdin.close()  # type: ignore[union-attr]
        assert process.wait(timeout=30) == 0


def test_the_tools_are_the_doors_and_each_argument_is_described(wire: Wire) -> None:
    tools = {tool["name"]: tool for tool in wire.ask("tools/list")["tools"]}
    assert set(tools) == {
        "predict", "megatron", "explain", "search", "read", "replay", "gpus", "architectures", "doctor"
    }  # fmt: skip
    for tool in tools.values():
        assert tool["description"].endswith(".")
        assert all(argument["description"] for argument in tool["inputSchema"]["properties"].values()), tool["name"]


def test_a_prediction_is_the_one_of_the_api(wire: Wire) -> None:
    answer = wire.call("predict", job=JOB, gpu="A100-80GB")
    assert answer["structuredContent"] == json.loads(json.dumps(api.predict(JOB, "A100-80GB").to_mapping()))
    assert json.loads(answer["content"][0]["text"])["fits"] == answer["structuredContent"]["fits"] == "yes"


def test_a_bad_question_is_a_sentence_and_the_next_one_is_answered(wire: Wire) -> None:
    refused = wire.call("predict", job=JOB, gpu="H100-80G")
    assert refused["isError"]
    assert "did you mean 'H100-80GB'" in refused["content"][0]["text"]
    assert "Traceback" not in refused["content"][0]["text"]
    assert not wire.call("predict", job="llama-3.2-1b", gpu="H100-80GB").get("isError")


def test_an_argument_that_a_tool_does_not_have_is_refused(wire: Wire) -> None:
    refused = wire.call("predict", job=JOB, gpu="H100-80GB", gpus_per_node=4)
    assert refused["isError"]
    assert refused["content"][0]["text"].startswith("gpus_per_node is no argument of predict; ")


def test_what_is_wrong_with_an_argument_is_said_in_the_projects_words(wire: Wire) -> None:
    missing = wire.call("predict", job=JOB)["content"][0]["text"]
    assert missing == "gpu is required and missing: GPU type, such as H100-80GB; `gpus` lists them."
    wrong = wire.call("search", job=JOB, gpu="H100-80GB", num_gpus=0)["content"][0]["text"]
    assert wrong.startswith("num_gpus=0 is not right (input should be greater than or equal to 1): GPUs to spread it over")


def test_what_a_configuration_does_not_say_comes_beside_it(wire: Wire, tmp_path: Path) -> None:
    training = "model_name_or_path: llama-3.2-1b\nper_device_train_batch_size: 1\nmax_length: 1024\ndeepspeed: z3.json\n"
    (tmp_path / "z3.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    beside = {"num_gpus": 8, "files": [str(tmp_path / "z3.json")]}
    assert "data_parallel_size: 8" in wire.call("read", job=training, **beside)["content"][0]["text"]
    answer = wire.call("predict", job=training, gpu="H100-80GB", **beside)
    known = api.predict(api.read(training, beside["files"], 8), "H100-80GB").peak_allocated_bytes.point
    assert answer["structuredContent"]["peak_allocated_bytes"]["point"] == known


def test_texts_say_what_the_commands_print(wire: Wire) -> None:
    explained = wire.call("explain", job=JOB, gpu="A100-80GB")["content"][0]["text"]
    assert explained.startswith("llama-3.2-1b on A100-80GB, rank 0: one steady step")
    understood = wire.call("read", job="per_device_train_batch_size: 2\nmodel_name_or_path: llama-3.2-1b\n")
    assert "micro_batch_size: 2" in understood["content"][0]["text"]


def test_plans_and_the_words_of_the_catalog_are_found(wire: Wire) -> None:
    found = wire.call("search", job=JOB, gpu="A100-80GB", num_gpus=2, top=3)["structuredContent"]
    assert [plan["fits"] for plan in found["plans"]] == ["yes"] * 3
    flags = ["--num-layers", "4", "--hidden-size", "512", "--num-attention-heads", "8", "--seq-length", "512"]
    flags += ["--micro-batch-size", "1", "--bf16"]
    assert wire.call("megatron", arguments=flags, gpu="H100-80GB", num_gpus=1)["structuredContent"]["fits"]
    assert wire.call("gpus")["structuredContent"]["H100-80GB"] > 2**36


def test_the_protocols_own_client_is_served() -> None:
    from mcp import Client, StdioServerParameters, stdio_client

    async def ask() -> Any:
        transport = stdio_client(StdioServerParameters(command=SERVER[0], args=SERVER[1:]))
        async with Client(transport) as client:
            return await client.call_tool("predict", {"job": JOB, "gpu": "A100-80GB"})

    assert asyncio.run(ask()).structured_content["fits"] == "yes"
