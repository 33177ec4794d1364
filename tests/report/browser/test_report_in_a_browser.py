"""The report in a real browser: it runs without complaint, sorts, filters, fits and prints."""

import re
import time
from pathlib import Path
from typing import Any

import pytest

from fedsim.report.html import write_report

pytestmark = pytest.mark.slow  # a minute in all

PHONE = {"width": 390, "height": 800}
DESK = {"width": 1400, "height": 900}
COUNT = 10_000


@pytest.fixture
def page_of(open_page):
    """Return a function that writes the report of a run directory and opens it."""

    def open_(directory, **settings):
        write_report(directory)
        return open_page(directory.report, **settings)

    return open_


def private_figures(count: int) -> dict[str, Any]:
    """Return `client_data.json` of clients with two or three classes."""
    labels = [[max(0, 40 - 20 * ((k - n) % 10)) for k in range(10)] for n in range(count)]
    rows = [
        {"client": n, "labels": own, "held_out": own, "correct": [k // 2 for k in own]}
        for n, own in enumerate(labels)
    ]
    return {"schema": 1, "classes": [f"kind {k}" for k in range(10)], "clients": rows}


def column(page, number: int) -> list[str]:
    return page.texts(f"#clients tbody tr > :nth-child({number})")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"private": False},
        {"clients": 300},
        {"rounds": 0, "status": "interrupted"},
        {"rounds": 1, "status": "failed", "task": "regression"},
    ],
    ids=["private", "plain", "300 clients", "nothing finished", "failed"],
)
def test_renders_without_complaint_and_asks_for_nothing(make_run, page_of, settings, dark):
    page = page_of(make_run(**settings), dark=dark)
    assert page.complaints == []
    assert [url for url in page.requests if not url.startswith("file:")] == []
    assert len(page.requests) == 1
    assert page.js("document.documentElement.classList.contains('js')")


@pytest.mark.parametrize("settings", [{}, {"clients": 300}, {"private": False}])
@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_never_scrolls_sideways(make_run, page_of, settings, make_rounds, width):
    rows = make_rounds(3, [], private=False, task="classification")
    rows[0]["timeline"] = {"checking noise and clipping": 1.0}
    rows[0]["failed"] = [{"client": 1, "reason": "x" * 400}]
    page = page_of(make_run(name="a" * 90, rounds=rows, **settings), width=width, height=720)
    assert "x" * 99 in page.texts("#incidents")[0]
    root = "document.documentElement"
    assert page.js(f"{root}.scrollWidth") <= page.js(f"{root}.clientWidth")


def test_sorts_by_every_column_both_ways(make_run, page_of):
    page = page_of(make_run(clients=30))
    headings = page.texts("#clients thead th")
    assert headings[0] == "client"
    for number in range(1, len(headings)):  # notes are text
        button = f"#clients thead th:nth-child({number}) button"
        for _ in range(2):
            page.click(button)
            state = page.js(
                f"document.querySelector('{button}').parentNode.getAttribute('aria-sort')"
            )
            values = [float(text.replace(",", "")) for text in column(page, number)]
            assert values == sorted(values, reverse=state == "descending")
        sorted_now = page.js("document.querySelectorAll('th[aria-sort$=ending]').length")
        assert sorted_now == 1


def test_the_number_of_a_client_stands_beside_its_figures(make_run, page_of, private_client):
    spends = [private_client(n, 100, 1.0 + n, 5) for n in range(3)]
    spends[2]["withdrawn_round"] = 3  # with the largest ε: a note that takes several lines
    page = page_of(make_run(clients=spends, rounds=5), width=700)
    row = "document.querySelectorAll('#clients tbody tr')[2]"
    tops = page.js(
        f"[...{row}.children].map((e) => {{ const r = document.createRange();"
        " r.selectNodeContents(e); return r.getBoundingClientRect().top; })"
    )
    assert max(tops) - min(tops) < 2


def test_first_click_on_epsilon_shows_the_largest(make_run, page_of):
    directory = make_run(clients=30)
    page = page_of(directory)
    page.click("#clients th[data-key=epsilon] button")
    epsilons = [spend["epsilon"] for spend in directory.read_json("privacy.json")["clients"]]
    assert float(column(page, 2)[0]) == max(epsilons)
    assert "largest ε" in column(page, 11)[0]


def test_filters_by_number_epsilon_and_note(make_run, page_of, private_client):
    spends = [private_client(n, 100 + n, 1.0 + n / 100, 5) for n in range(120)]
    spends[7]["withdrawn_round"] = 3
    page = page_of(make_run(clients=spends, rounds=5))
    assert page.texts("#clients-said") == ["1–50 of 120 clients"]
    page.type("#find", "3, 10-12")
    assert column(page, 1) == ["3", "10", "11", "12"]
    assert page.texts("#clients-said") == ["1–4 of 4 that fit, of 120 clients"]
    page.type("#find", "no number")
    assert page.texts("#clients tbody td") == ["No client fits."]
    assert page.js("document.getElementById('find').getAttribute('aria-invalid')") == "true"
    page.click("#clients-tools button[type=reset]")
    page.js("new Promise((done) => setTimeout(done, 50))")
    page.type("#least", "2.185")
    assert column(page, 1) == ["119"]
    page.type("#least", "")
    page.js(
        "(() => { const s = document.getElementById('note'); s.value = 'withdrew';"
        " s.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )
    assert column(page, 1) == ["7"]
    assert column(page, 11) == ["withdrew in round 3"]


def test_clients_with_names_are_found_by_name(make_run, page_of, private_client):
    spends = [private_client(n, 100, 1.0 + n, 5) for n in range(3)]
    names = ("Nord", "<b>Süd</b>", "Klinik am Rhein, mit einem sehr langen Namen und mehr")
    for spend, name in zip(spends, names, strict=True):
        spend["name"] = name
    page = page_of(make_run(clients=spends, rounds=5), **PHONE)
    assert column(page, 2) == [*names]
    page.type("#find", "süd")
    assert column(page, 1) == ["1"]
    page.type("#find", "0-1")
    assert column(page, 1) == ["0", "1"]
    page.type("#find", "")
    cell = "document.querySelector('#clients tbody tr:last-child td.epsilon')"
    assert page.js(f"{cell}.getBoundingClientRect().right") < PHONE["width"]
    page.click("#clients th[data-key=name] button")
    assert column(page, 1) == ["1", "2", "0"]
    assert page.complaints == []


@pytest.mark.long  # measures the machine
def test_ten_thousand_clients_open_fast(make_run, page_of, browser):
    directory = make_run(clients=COUNT)
    write_report(directory)
    page = page_of(directory, width=1100)
    start = time.monotonic()
    page.open(directory.report)
    assert column(page, 1)  # scripts have run
    assert time.monotonic() - start < 3.0
    start = time.monotonic()
    page.click("#clients th[data-key=examples] button")
    assert len(column(page, 6)) == 50
    assert time.monotonic() - start < 1.0


def test_ten_thousand_clients_turn_pages(make_run, page_of, browser):
    directory = make_run(clients=COUNT)
    write_report(directory)
    assert directory.report.stat().st_size < 5_000_000
    page = page_of(directory, width=1100)
    page.open(directory.report)
    assert column(page, 1)  # scripts have run
    page.click("#clients th[data-key=examples] button")
    sizes = [int(text) for text in column(page, 6)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == 50
    page.click("[data-go=last]")
    assert page.texts("#clients-said") == ["9,951–10,000 of 10,000 clients"]
    assert page.js("document.querySelector('[data-go=next]').disabled")
    page.click("[data-go=back]")
    assert page.texts("#clients-said") == ["9,901–9,950 of 10,000 clients"]
    assert page.complaints == []


def test_without_script_there_are_rows_and_a_pointer(make_run, browser, open_page):
    directory = make_run(clients=300)
    write_report(directory)
    page = open_page(directory.report)
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    page.open(directory.report)
    page.call("Emulation.setScriptExecutionDisabled", value=False)
    visible = "getComputedStyle(document.querySelector('{}')).display != 'none'"
    assert len(column(page, 1)) == 100
    assert page.js(visible.format("p.static"))
    assert not page.js(visible.format("#clients-tools"))
    assert not page.js(visible.format(".under"))


def test_hostile_text_runs_nothing(make_run, make_rounds, page_of, private_client):
    attacks = [
        "<script>document.title='owned'</script>",
        "<img src=x onerror=\"document.title='owned'\">",
        "</script><script>document.title='owned'</script>",
        '"><svg onload="document.title=\'owned\'">',
        "javascript:document.title='owned'",
        "{{ 7 * 7 }}<!--",
        "</textarea></title><script>document.title='owned'</script>",
    ]
    spends = [private_client(number, 100, 2.0, 5) for number in range(3)]
    rows = make_rounds(5, spends, private=True, task="classification")
    rows[0]["failed"] = [{"client": 1, "reason": attack} for attack in attacks]
    rows[1]["withdrawn"] = [{"client": 2, "reason": attacks[1]}]
    directory = make_run(name=attacks[2], clients=spends, rounds=rows, status="failed")
    summary = directory.read_json("summary.json")
    directory.write_json("summary.json", {**summary, "reason": attacks[0]})
    page = page_of(directory)
    assert page.js("document.title") == f"{attacks[2]}: fedsim report"
    assert page.complaints == []
    assert page.js("document.querySelectorAll('script').length") == 2
    assert page.js("document.images.length") == 0
    shown = page.texts("#incidents td:last-child")
    assert shown[: len(attacks)] == attacks


def test_tooltips_follow_the_pointer(make_run, page_of):
    page = page_of(make_run())
    assert page.js("document.getElementById('tip').hidden")
    page.hover(".plots svg .tip:nth-of-type(12)")
    assert not page.js("document.getElementById('tip').hidden")
    assert re.fullmatch(r"round 12: \d+\.\d%", page.texts("#tip")[0])
    page.hover("h1")
    assert page.js("document.getElementById('tip').hidden")


def test_the_keyboard_reaches_everything_and_focus_is_seen(make_run, page_of):
    page = page_of(make_run())
    page.js("document.querySelector('#clients th[data-key=steps] button').focus()")
    for kind in ("keyDown", "keyUp"):
        page.call(
            "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter",
            windowsVirtualKeyCode=13, text="\r" if kind != "keyUp" else "",
        )  # fmt: skip
    assert page.js("document.activeElement.parentNode.getAttribute('aria-sort')") == "descending"
    outline = page.js("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


CONTRAST = """
(() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => {
    const one = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const line = [r, g, b].map((value) => one(value / 255));
    return 0.2126 * line[0] + 0.7152 * line[1] + 0.0722 * line[2];
  };
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || element.closest("script, title, [hidden]")) continue;
    const style = getComputedStyle(element);
    const ink = element.closest("svg") ? style.fill : style.color;
    const [one, other] = [light(parse(ink)), light(behind(element))].sort((a, b) => b - a);
    const ratio = (one + 0.05) / (other + 0.05);
    const off = element.closest(":disabled");
    if (ratio < 4.5 && !off) found.push([walker.currentNode.data.trim().slice(0, 40), ink, ratio]);
  }
  return found;
})()
"""


# Elements outside of the page, and texts of a drawing that lie on another text of it.
OUTSIDE = """
(() => {
  const found = [], width = document.documentElement.clientWidth;
  for (const element of document.querySelectorAll("main *")) {
    if (element.closest(".scroll, pre, svg, .hidden, [hidden]")) continue;
    const box = element.getBoundingClientRect();
    if (box.width && (box.left < -1 || box.right > width + 1)) found.push(element.outerHTML.slice(0, 80));
  }
  for (const drawing of document.querySelectorAll("svg")) {
    const texts = [...drawing.querySelectorAll("text")];
    const boxes = texts.map((text) => text.getBoundingClientRect());
    boxes.forEach((one, i) => boxes.slice(0, i).forEach((other, j) => {
      const wide = Math.min(one.right, other.right) - Math.max(one.left, other.left);
      const tall = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
      if (wide > 2 && tall > 4) found.push([texts[i].textContent, texts[j].textContent]);
    }));
  }
  return found;
})()
"""  # noqa: E501


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_has_contrast(make_run, page_of, private_client, dark):
    spends = [private_client(number, 999, 2.0 + number, 5) for number in range(3)]
    spends[1]["examples"] = 2000  # a warning is shown too
    page = page_of(make_run(clients=spends, rounds=5, status="interrupted"), dark=dark)
    assert page.js(CONTRAST) == []


def test_a_phone_shows_epsilon_first(make_run, page_of):
    page = page_of(make_run(), **PHONE)
    top = "document.querySelector('{}').getBoundingClientRect().top"
    guarantee, metric = (page.js(top.format(card)) for card in (".card.guarantee", ".card"))
    assert guarantee < metric
    assert guarantee < PHONE["height"] / 2
    cell = "document.querySelector('#clients tbody td.epsilon').getBoundingClientRect()"
    assert page.js(f"{cell}.right") < PHONE["width"] / 2


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_table_that_goes_on_has_a_shadow_at_its_edge(make_run, page_of, dark):
    page = page_of(make_run(), dark=dark, **PHONE)
    table = "document.querySelector('#spends .scroll')"
    assert page.js(f"{table}.scrollWidth > {table}.clientWidth")
    edge = f"(() => {{ const b = {table}.getBoundingClientRect(); return [b.right, b.top]; }})()"
    page.js(f"{table}.scrollIntoView({{behavior: 'instant'}})")
    right, top = page.js(edge)
    shaded = page.pixel(right - 2, top + 300)
    assert sum(shaded) < sum(page.pixel(right + 8, top + 300)) - 0.06  # the page beside the table
    page.js(f"{table}.scrollLeft = 10000")
    assert page.pixel(right - 2, top + 300) == page.pixel(right + 8, top + 300)


@pytest.mark.parametrize("private", [True, False], ids=["private", "plain"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["1400", "390"])
def test_nothing_overlaps_or_leaves_its_place(make_run, page_of, private, dark, size):
    directory = make_run(private=private)
    if not private:
        directory.write_json("client_data.json", private_figures(10))
    page = page_of(directory, dark=dark, **size)
    assert page.complaints == []
    shown = page.texts("h2") + page.texts("h3") + page.texts("figcaption")
    new = {"Experiment", "Test accuracy against its cost", "against communication"}
    new |= {"Noise-to-signal ratio"} if private else {"Clients’ own data"}
    assert new <= set(shown)
    assert page.js(CONTRAST) == []
    assert page.js(OUTSIDE) == []


def test_folded_parts_are_open_on_paper(make_run, page_of):
    page = page_of(make_run(), **DESK)
    visible = "document.querySelector('#settings pre').checkVisibility()"
    assert not page.js(visible)
    page.click("#settings summary")
    assert page.js(visible)
    page.click("#settings summary")
    assert not page.js(visible)
    page.call("Emulation.setEmulatedMedia", media="print")
    assert page.js(visible)


def test_equal_epsilons_are_words_and_no_bars(make_run, page_of, private_client):
    spends = [private_client(number, 100 + number, 7.99999, 5) for number in range(4)]
    page = page_of(make_run(clients=spends, rounds=5))
    assert page.texts("#spends > p")[0] == "All 4 clients spent the same ε = 8."
    assert page.texts("#spends figure") == []
    assert set(column(page, 11)) == {"–"}


def test_the_table_without_privacy_sorts_and_filters(make_run, page_of, make_rounds):
    rows = make_rounds(4, [{"client": n, "epsilon": 0} for n in range(9)], private=False, task="")
    rows[1]["participants"].remove(7)
    rows[1]["failed"] = [{"client": 7, "reason": "out of memory"}]
    page = page_of(make_run(clients=60, private=False, rounds=rows))
    assert page.texts("#clients thead th") == ["client", "examples", "rounds", "notes"]
    page.click("#clients th[data-key=examples] button")
    sizes = [int(text) for text in column(page, 2)]
    assert sizes == sorted(sizes, reverse=True)
    page.type("#find", "6-8")
    assert sorted(column(page, 1)) == ["6", "7", "8"]
    page.type("#find", "7")
    assert [column(page, number)[0] for number in (3, 4)] == ["3", "1 lost update"]
    assert page.complaints == []


@pytest.mark.parametrize("count", [10, 60])
def test_cells_of_private_figures_stay_legible(make_run, page_of, count):
    directory = make_run(clients=count, private=False)
    directory.write_json("client_data.json", private_figures(count))
    page = page_of(directory, dark=True, **PHONE)
    drawing = "document.querySelector('#client-data svg')"
    box = page.js(
        f"(() => {{ const b = {drawing}.getBoundingClientRect(); return [b.width, b.height]; }})()"
    )
    assert box[0] <= PHONE["width"]
    assert box[1] < PHONE["height"]
    paths = f"[...{drawing}.querySelectorAll('path')]"
    strongest = page.js(f"Math.max(...{paths}.map((path) => Number(path.style.opacity || 0)))")
    assert 0 < strongest <= 0.45
    page.hover("#client-data svg .tip:nth-of-type(4)")
    assert page.texts("#tip")[0].startswith("client ")
    page.call("Emulation.setEmulatedMedia", media="print")
    assert page.js(f"{drawing}.getBoundingClientRect().width") > 100


def test_prints_in_dark_ink_on_white_without_controls(make_run, page_of):
    page = page_of(make_run(), dark=True)
    assert page.pdf().startswith(b"%PDF")
    page.call("Emulation.setEmulatedMedia", media="print")
    assert page.js("getComputedStyle(document.body).color") == "rgb(27, 31, 36)"
    hidden = "getComputedStyle(document.querySelector('{}')).display"
    for selector in ("nav", "#clients-tools", ".under", ".skip"):
        assert page.js(hidden.format(selector)) == "none"


def test_pictures_of_the_page_can_be_taken(make_run, page_of, tmp_path: Path):
    picture = page_of(make_run()).screenshot(tmp_path / "page.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 50_000
