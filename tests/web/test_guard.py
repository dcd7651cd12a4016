"""The page's server as a hostile page, program or question meets it."""

from __future__ import annotations

import contextlib
import http.client
import json
import time

import pytest

pytestmark = [pytest.mark.needs("gradio"), pytest.mark.filterwarnings("ignore")]  # Gradio's and uvicorn's own


@pytest.fixture(scope="module")
def port(served):
    from peakcast.web.server import application

    with served(application(None)) as port:
        yield port


def asked(port, method, path, headers=(), body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body=body, headers=dict(headers))
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def test_the_page_is_served_with_headers_that_keep_others_out(port):
    code, headers, body = asked(port, "GET", "/")
    assert (code, b"gradio" in body) == (200, True)
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert (headers["x-content-type-options"], headers["x-frame-options"]) == ("nosniff", "DENY")


@pytest.mark.parametrize(
    ("method", "path", "headers", "code"),
    [
        ("GET", "/", {"Host": "evil.example"}, 421),
        ("GET", "/", {"Host": "evil.example:80"}, 421),
        ("GET", "/", {"Host": ""}, 421),
        ("GET", "/", {"Host": "[::1"}, 421),
        ("GET", "/", {"Host": "localhost:1"}, 200),
        ("GET", "/", {"Host": "[::1]:80"}, 200),
        ("GET", "/", {"Origin": "http://evil.example"}, 403),
        ("POST", "/gradio_api/queue/join", {"Origin": "http://evil.example"}, 403),
        ("POST", "/gradio_api/queue/join", {"Origin": "null"}, 403),
        ("POST", "/gradio_api/queue/join", {"Sec-Fetch-Site": "cross-site"}, 403),
        ("POST", "/gradio_api/upload", {}, 404),
        ("POST", "/gradio_api/upload/", {}, 404),
        ("POST", "/anything", {}, 404),
        ("GET", "/gradio_api/file=/etc/passwd", {}, 404),
        ("GET", "/gradio_api/proxy=http://evil.example", {}, 404),
        ("PUT", "/", {}, 405),
        ("POST", "/gradio_api/queue/join", {"Content-Length": "300000000"}, 413),
    ],
)
def test_other_names_other_pages_files_and_floods_are_turned_away(port, method, path, headers, code):
    found, answer, _ = asked(port, method, path, headers)
    assert found == code
    assert answer["x-content-type-options"] == "nosniff"


def test_a_body_of_no_known_length_is_read_no_further_than_a_question(port):
    def flood():
        for _ in range(300):
            yield b"x" * 2**20

    begun = time.monotonic()
    with contextlib.suppress(OSError, http.client.HTTPException):  # the server hangs up, or says that it has had enough
        assert asked(port, "POST", "/gradio_api/queue/join", {"Content-Type": "application/json"}, flood())[0] >= 400
    assert time.monotonic() - begun < 30
    assert asked(port, "GET", "/")[0] == 200


def question(port, text):
    """What the page shows first for a text, asked as the page asks it."""
    from peakcast.web.page import KNOBS

    body = json.dumps({"data": [text, None, "", "", "H100-80GB", None, None, *[None] * len(KNOBS)]})
    code, _, event = asked(port, "POST", "/gradio_api/call/ask", {"Content-Type": "application/json"}, body)
    assert code == 200, event
    code, _, answer = asked(port, "GET", f"/gradio_api/call/ask/{json.loads(event)['event_id']}")
    assert code == 200, answer
    return json.loads(answer.decode().partition("data: ")[2])


GREEDY = "architecture: {model_type: gpt2, n_embd: 64, n_layer: 1000, n_head: 4, vocab_size: 99}"
HOSTILE = {
    "a key of 90,000 parts": ".".join("a" * 90_000) + " = 1\n",
    "deep": "[" * 100_000,
    "aliases": "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{c}: &{c} [{','.join(['*' + p] * 9)}]\n" for p, c in zip("abcdefg", "bcdefgh", strict=True)),
    "digits": '{"architecture": "gpt2", "sequence_length": ' + "9" * 5000 + "}",
    "newlines": "\n" * 150_000 + "x y",
    "dashes and blanks": "---" + " " * 150_000 + "x\n",
    "a whole number": "sequence_length = " + "9" * 150_000,
    "a whole number in base 60": "a: " + ":".join(["59"] * 40_000),
    "tables in tables": "x = {" + "a={" * 20_000,
    "an array of words": "A=(" + "x " * 80_000 + ")\npython pretrain_gpt.py ${A[@]} ${A[@]}\n",
    "a variable that doubles": "A=xxxxxxxxxx\n" + "A=$A$A$A$A$A$A\n" * 30 + "python pretrain_gpt.py $A\n",
    "files": "architecture: gpt2\n" + "".join(f"--- f{i}.json\n{{}}\n" for i in range(9_000)),
    "micro-batches": "{architecture: gpt2, framework: torch, gradient_accumulation_steps: 1000000000, parallelism: "
    "{pipeline_parallel_size: 4}}",
    "a script in itself": "python train.py --x " + "${a:-" * 20_000,
    "a name": "x" * 400,
    "a device": "/dev/zero",
    "half a character": '{"architecture": "\\ud800"}',
    "layers": json.dumps({"architecture": {"model_type": "gpt2", "n_layer": 5_000_000, "n_embd": 64, "n_head": 4}}),
    "markup": "<script>alert(1)</script>: {",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_question_is_answered_with_a_sentence(port, name):
    begun = time.monotonic()
    answer, *others = question(port, HOSTILE[name])
    assert time.monotonic() - begun < 20
    assert "No answer" in answer
    assert not any(others)
    assert "this is a bug" not in answer
    assert "<script" not in answer


def test_after_hostile_questions_one_is_answered_as_ever(port):
    """After one that is cut off, one that is refused as it is read, and one whose job is refused."""
    for name in ("a key of 90,000 parts", "markup", "layers"):
        question(port, HOSTILE[name])
        assert "gpt2 on " in question(port, "gpt2")[0]


def test_a_question_has_a_budget():
    """With a fifth of a second, one that is let in is cut off; its process is gone and the server's is as before."""
    from peakcast.core.workers import LostError, QuestionLimits, Workers
    from peakcast.web.answering import panels_of
    from peakcast.web.asking import PageState

    workers = Workers(panels_of, 1, QuestionLimits(0.2), method="forkserver")
    with pytest.raises(LostError, match=r"within 0\.2 s"):
        workers.ask(PageState(text=GREEDY))
    workers.close()
