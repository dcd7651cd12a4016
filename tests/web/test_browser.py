"""The page in a real browser, at desktop and phone width, with mouse and with the keyboard alone."""

import shutil
from contextlib import contextmanager

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.needs("gradio", "playwright"),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)"),
    pytest.mark.filterwarnings("ignore"),  # Gradio's and uvicorn's own
]
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update"]
SIZES = {"desktop": {"width": 1280, "height": 900}, "phone": {"width": 390, "height": 844}}


@pytest.fixture(scope="module")
def address(tmp_path_factory, served):
    """The address of a served page, with reports beside it."""
    from peakcast.web.server import application

    reports = tmp_path_factory.mktemp("reports")
    (reports / "index.html").write_text("<!doctype html><title>accuracy</title><h1>How accurate peakcast is</h1>")
    with served(application(reports)) as port:
        yield f"http://127.0.0.1:{port}/"


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright  # takes half a second, which no other tests should wait for

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def visitor(browser):
    """A browser's context, in which what a page has loaded is kept for the next one."""
    context = browser.new_context()
    yield context
    context.close()


@contextmanager
def opened(visitor, address):
    """A page that has answered its first question; that it asked nobody else is checked at the end."""
    page = visitor.new_page()
    page.set_viewport_size(SIZES["desktop"])
    outside, faults = [], []
    page.on("request", lambda r: r.url.startswith((address, "data:", "blob:")) or outside.append(r.url))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(address)
    page.wait_for_selector("#answer h2")
    yield page
    assert (outside, faults) == ([], [])
    page.close()


@pytest.fixture
def fresh(visitor, address):
    """A page that nothing else was asked: controls that lose the focus may ask again, and be answered late."""
    with opened(visitor, address) as page:
        yield page


@pytest.fixture(scope="module")
def page(visitor, address):
    """A page that tests use one after the other, each with another network: to load one takes seconds."""
    with opened(visitor, address) as page:
        yield page


@pytest.fixture
def phone(page):
    """The page at a phone's width, for tests of what lies where. What it says does not depend on its width."""
    page.set_viewport_size(SIZES["phone"])
    yield page
    page.set_viewport_size(SIZES["desktop"])


def answered(page, words):
    page.wait_for_function("words => document.querySelector('#answer')?.innerText.includes(words)", arg=words)


def nothing_sticks_out(page):
    """Whether the page, as it is now, is no wider than the window on a phone and on a desktop."""
    wider = []
    for size in SIZES.values():
        page.set_viewport_size(size)
        wider.append(page.evaluate("document.documentElement.scrollWidth > window.innerWidth"))
    return not any(wider)


def test_layouts_are_searched_and_those_of_another_question_go(phone):
    phone.fill("#text textarea", "pythia-160m")
    phone.click("#predict")
    answered(phone, "pythia-160m on ")
    phone.click("#layouts button")
    phone.fill("#spread input", "2")
    phone.click("#search")
    phone.wait_for_selector("#plans table")
    assert "2 × H100-80GB" in phone.inner_text("#plans")
    assert nothing_sticks_out(phone)
    phone.fill("#micro_batch_size input", "2")
    phone.wait_for_function("!document.querySelector('#plans table')")


def test_a_configuration_is_answered_and_a_knob_moves_the_number(phone):
    phone.fill("#text textarea", '{"architecture": "gpt2", "sequence_length": 1024, "micro_batch_size": 8}')
    assert phone.input_value("#checkpointing input") == "as given"  # no knob of the first question holds for this one
    phone.click("#predict")
    answered(phone, "gpt2 on ")
    phone.wait_for_function("document.querySelector('#answer').getBoundingClientRect().top < innerHeight")  # in sight
    before = phone.inner_text("#answer table.bars tbody tr:first-child td")
    assert phone.locator("#timeline svg:visible").count() == 1
    assert phone.evaluate("(e => e.scrollWidth <= e.clientWidth)(document.querySelector('#timeline .timeline'))")
    phone.fill("#micro_batch_size input", "16")
    phone.wait_for_function(
        "before => document.querySelector('#answer table.bars tbody tr:first-child td').innerText != before", arg=before
    )
    after = phone.inner_text("#answer table.bars tbody tr:first-child td")
    assert float(after.split()[0]) > float(before.split()[0])
    assert nothing_sticks_out(phone)


@pytest.mark.whole  # eight seconds; test_asking.py asks the server by a link
def test_the_link_reproduces_the_question(page):
    page.fill("#text textarea", "qwen3-0.6b")
    page.click("#predict")
    answered(page, "qwen3-0.6b on ")
    numbers = "#answer table.bars tbody td strong"
    before = page.locator(numbers).all_inner_texts()
    page.goto(page.evaluate("document.querySelector('#link a').href"))  # a page keeps nothing when another is loaded
    answered(page, "qwen3-0.6b on ")
    assert page.input_value("#text textarea") == "qwen3-0.6b"
    assert page.locator(numbers).all_inner_texts() == before


def test_it_works_with_the_keyboard_alone_and_the_verdict_is_announced_to_screen_readers(page):
    page.focus("#text textarea")
    page.keyboard.press("Control+A")
    page.keyboard.type("opt-125m")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "predict"
    page.keyboard.press("Enter")
    answered(page, "opt-125m on ")
    page.wait_for_function("document.querySelector('#said').textContent.includes('opt-125m on ')")
    assert page.get_attribute("#said", "role") == "status"
    assert page.inner_text("#answer h2") in page.text_content("#said")


def test_every_control_has_a_label_and_a_visible_focus(page):
    """By Chromium's accessibility tree, which is what a screen reader is given."""
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    roles = ("textbox", "spinbutton", "combobox", "button", "link", "region", "searchbox", "checkbox")
    controls = [node for node in tree if node.get("role", {}).get("value") in roles]
    assert len(controls) > 15
    assert [node for node in controls if not node.get("name", {}).get("value", "").strip()] == []
    page.focus("#text textarea")
    seen = set()
    for _ in range(18):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("(e => e.tagName + ',' + getComputedStyle(e).outlineStyle)(document.activeElement)"))
    assert {style for style in seen if not style.startswith("BODY")} >= {"BUTTON,solid", "INPUT,solid"}
    assert not any(style.endswith("none") for style in seen if not style.startswith("BODY"))


@pytest.mark.whole  # twelve seconds; test_guard.py and test_asking.py ask the same of the server
def test_malformed_or_huge_input_gets_a_message(fresh):
    for text, words in (
        ("{", "is not valid JSON"),
        ("x" * 300_000, "at most 200,000"),
        ("<img src=x onerror=alert(1)>", "must hold a mapping"),
    ):
        fresh.fill("#text textarea", text)
        fresh.click("#predict")
        answered(fresh, words)
        assert fresh.inner_text("#answer h2") == "No answer"
        assert "Traceback" not in fresh.inner_text("body")
        assert fresh.locator("#answer img").count() == 0


def test_a_cut_link_gets_a_message_and_the_reports_are_one_click_away(page, address):
    page.click("text=accuracy reports")
    page.wait_for_selector("text=How accurate peakcast is")
    page.goto(address + "?q=abc")
    answered(page, "The link holds no question")
