"""The page of a comparison: whole in one file, readable in light and dark, no wider than a telephone."""

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from zoo.cli import main
from zoo.comparison.measure import measure_arms
from zoo.comparison.plan import make_plan
from zoo.comparison.report import collect, entropies_of, write_report
from zoo.comparison.run import run_plan
from zoo.page import Section, Table, to_html, to_markdown
from zoo.plot import COLOURS, Chart, Line, chart_svg, draw_chart, log_places, short, style_of

RECIPE = Path(__file__).parents[2] / "recipes/tiny_text.yaml"
VOID = {"meta", "link"}  # elements without an end
CHART = Chart(
    "curves",
    "Score <against> tokens",
    "tokens",
    "bits & bytes",
    (
        Line("GA", ((1e3, 3.0), (2e3, 2.5)), ((2.9, 3.1), (2.4, 2.6))),
        Line("12x(GDN,SWA)", ((1e3, 2.8), (2e3, 2.2))),
    ),
    {"unigram entropy": 4.5},
)
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on PATH; on Debian: apt-get install chromium-headless-shell, as .ci/run does"
)


CHARTS = [
    "Score against training tokens",
    "Score against training FLOPs",
    "Score against training seconds",
    "Score against state bytes at 4,096 tokens",
    "Score against parameters without embedding and head",
    "Score against the length of rows",
    "Loss against position",
    "Throughput against context",
]


class Reader(HTMLParser):
    """What a page would fetch, its text, and the names of its elements; every element must be closed."""

    def __init__(self, page):
        super().__init__()
        self.open, self.fetched, self.text, self.names = [], [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.names += [found["id"]] if "id" in found else []
        self.fetched += [v for k, v in found.items() if k in ("src", "href", "xlink:href") and v[:1] != "#"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A comparison of two arms and two seeds, trained for a few steps, with longer rows and timed steps."""
    root = tmp_path_factory.mktemp("page")
    small = {"model.n_layers": 2, "model.d_model": 32, "model.d_ff": 32, "model.mixers.GDN.head_dim": 16}
    small |= {"budget.tokens": 2560, "budget.batch_tokens": 256, "model.lr_scheduler.init_args.warmup_steps": 2}
    small |= {"trainer.val_check_interval": 5, "data.init_args.source": "excerpt", "data.init_args.val_tokens": 1024}
    words = [f"--{key}={value}" for key, value in small.items()]
    options = {"tolerance": 0.03, "seeds": 2, "contexts": (4096, 512), "factors": (1, 2), "leave_out": True}
    plan = make_plan(["GA", "GDN,SWA", "GA/none"], RECIPE, overrides=words, **options)
    outcome = run_plan(plan, root / "out")
    content = collect(plan, outcome, entropies_of(plan), "zoo compare", measure_arms(plan, root / "out"))
    write_report(content, root / "out")
    return root / "out"


# --------------------------------------------------------------------------------------------------------------- pieces
def test_a_chart_is_an_svg_whose_names_are_its_own_and_whose_text_takes_the_pages_colour():
    svg = chart_svg(CHART)
    tree = ElementTree.fromstring(svg)
    assert tree.attrib["role"] == "img"
    assert tree.attrib["aria-label"] == "Score <against> tokens: bits & bytes against tokens"
    texts = ["".join(element.itertext()) for element in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert {"GA", "12x(GDN,SWA)", "tokens", "bits & bytes", "unigram entropy 4.50"} <= set(texts)
    assert "currentColor" in svg
    assert all(colour.lower() in svg for colour in COLOURS[:2])
    names = re.findall(r' id="([^"]+)"', svg)
    assert len(names) == len(set(names))
    assert all(name.startswith("curves-") for name in names)
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg)) <= set(names)
    assert svg == chart_svg(CHART)


def test_no_arm_is_drawn_in_a_colour_that_a_dark_page_swallows():
    many = Chart("many", "t", "x", "y", tuple(Line(f"arm {i}", ((i, 1.0), (i + 1, 2.0))) for i in range(8)))
    assert "#000000" not in chart_svg(many)


def test_large_numbers_stand_at_their_ticks_and_not_as_a_power_over_the_axis():
    svg = chart_svg(Chart("speed", "t", "tokens", "tokens/s", (Line("GA", ((1, 2e5), (2, 1e6))),)))
    tree = ElementTree.fromstring(svg)
    texts = ["".join(element.itertext()) for element in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert {"200k", "1M"} <= set(texts)
    assert not any("e" in text and text[0].isdigit() for text in texts)


def test_no_two_of_49_arms_look_alike_and_the_first_seven_differ_in_both():
    styles = [style_of(index) for index in range(49)]
    assert len(set(styles)) == 49
    for part in zip(*styles[:7]):
        assert len(set(part)) == 7


@pytest.mark.parametrize(("low", "high"), [(4800, 11500), (1, 1e9), (6e-4, 1.1e-2), (900, 40_000), (5e5, 5.6e5)])
def test_a_logarithmic_axis_has_ticks_in_plain_figures(low, high):
    places = log_places(low, high)
    assert all(low <= place <= high for place in places)
    assert len(places) <= 12
    if high > 2 * low:
        assert len(places) >= 3
    lines = tuple(Line(name, ((x, 0.5),)) for name, x in (("a", low), ("b", high)))
    tree = ElementTree.fromstring(chart_svg(Chart("state", "t", "bytes", "score", lines, log=True)))
    texts = ["".join(element.itertext()) for element in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert {short(place) for place in places} <= set(texts)
    assert not any("10" in text and "\u00d7" in text for text in texts), texts


def test_a_chart_is_a_picture_too(tmp_path):
    draw_chart(CHART, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 10_000


def test_text_is_escaped_in_both_forms():
    table = Table((("arm", True), ("n", False)), [["<b>a|b*</b>", "1"]])
    sections = [Section("A & B", ("1 < 2",), table)]
    page = Reader(to_html("<title>", sections))
    assert page.open == []
    assert "<b>a|b*</b>" in page.text
    assert "1 < 2" in page.text
    assert "\\<b>a\\|b\\*\\</b>" in to_markdown("t", sections)


# ----------------------------------------------------------------------------------------------------------- the report
def test_the_page_fetches_nothing_and_holds_every_chart_and_table(folder):
    page = (folder / "report.html").read_text(encoding="utf-8")
    read = Reader(page)
    assert read.open == []
    assert read.fetched == ["data:,"]
    assert len(read.names) == len(set(read.names))
    assert "<script" not in page
    assert "url(http" not in page
    assert "@import" not in page
    assert re.findall(r'<svg role="img" aria-label="([^:]+):', page) == CHARTS
    assert "prefers-color-scheme: dark" in page
    titles = ("What was held equal", "Results", "Rows longer than in training", "Loss by position", "By context")
    for title in (*titles, "Measured by context", "Conditions", "Layers of GA", "Runs", "Provenance"):
        assert f"<h2>{title}</h2>" in page
    assert "left out: cannot be sized to the budget" in page


def test_page_and_markdown_show_the_numbers_of_the_json(folder):
    results = json.loads((folder / "results.json").read_text())
    page, markdown = ((folder / name).read_text(encoding="utf-8") for name in ("report.html", "report.md"))
    for text in (page, markdown):
        for arm in results["arms"]:
            assert f"{arm['mean']:.4f} ± {arm['half_interval']:.4f}" in text
            assert f"{arm['params']['non_embedding']:,}" in text
            assert f"{arm['deviation']:+.2%}" in text
            for run in arm["runs"]:
                assert f"{run['bpb']:.4f}" in text
                assert run["order_hash"][:16] in text
        assert results["data_hash"] in text
        assert results["versions"]["torch"] in text
    first, second = results["arms"]
    moved = second["state_bytes"]["4096"] / first["state_bytes"]["4096"] - 1
    assert f'<td class="number">{moved:+.1%}</td>' in page
    for picture in re.findall(r"\]\((\w+\.png)\)", markdown):
        assert (folder / picture).stat().st_size > 5_000


def test_the_report_is_written_anew_from_its_json_alone(folder, capsys):
    before = (folder / "report.html").read_text(encoding="utf-8")
    (folder / "report.html").unlink()
    assert main(["compare", "--report-only", str(folder)]) == 1, "an arm is left out"
    assert (folder / "report.html").read_text(encoding="utf-8") == before
    assert main(["compare", "--report-only", str(folder / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    for words, said in ((["GA"], "an arm"), (["--seeds", "2"], "--seeds"), (["--measure"], "--measure")):
        assert main(["compare", *words, "--report-only", str(folder)]) == 2
        assert f"{said} changes none of it" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------- in a browser
PROBE = """<script>
addEventListener("error", event => document.body.dataset.errors = event.message);
addEventListener("load", () => {
  const drawn = [...document.querySelectorAll("svg")].filter(svg => svg.getBBox().width > 50).length;
  const body = document.body.dataset;
  body.drawn = drawn; body.width = document.documentElement.scrollWidth; body.window = innerWidth;
  const cut = [...document.querySelectorAll("svg text")].filter(text => {
    const own = text.getBoundingClientRect(), edge = text.ownerSVGElement.getBoundingClientRect();
    return own.left < edge.left - 1 || own.right > edge.right + 1 || own.bottom > edge.bottom + 1;
  });
  body.cut = cut.map(text => text.textContent).join("; ");
  body.paper = getComputedStyle(document.body).backgroundColor;
});
</script></body>"""


def seen(folder, tmp_path, *flags):
    """What a headless Chromium makes of the page inside a frame of 390 px, from its own file."""
    page = (folder / "report.html").read_text(encoding="utf-8")
    (tmp_path / "probed.html").write_text(page.replace("</body>", PROBE), encoding="utf-8")
    # A headless window is never narrower than 500 px; a frame is.
    frame = '<iframe src="probed.html" width="390" height="844" style="border:0"></iframe>'
    outer = "<script>onload = () => document.body.append(JSON.stringify({...frames[0].document.body.dataset}))</script>"
    (tmp_path / "frame.html").write_text(f"<!doctype html><body>{frame}{outer}</body>", encoding="utf-8")
    words = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    words += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--enable-logging=stderr"]
    done = subprocess.run(
        [*words, *flags, "--dump-dom", (tmp_path / "frame.html").as_uri()], capture_output=True, text=True, timeout=50
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    found = re.search(r'\{"drawn".*?\}|\{"errors".*?\}', done.stdout)
    assert found, done.stdout[-500:] + done.stderr[-500:]
    return json.loads(found[0])


@needs_chromium
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_draws_every_chart_without_errors_and_without_scrolling_sideways(folder, tmp_path, dark):
    body = seen(folder, tmp_path, *(["--blink-settings=preferredColorScheme=0"] if dark else []))
    assert "errors" not in body
    assert int(body["drawn"]) == len(CHARTS)
    assert body["cut"] == "", "text of a chart that its edge cuts"
    assert int(body["window"]) == 390
    assert int(body["width"]) <= 390
    assert body["paper"] == ("rgb(22, 22, 22)" if dark else "rgb(255, 255, 255)")


@needs_chromium
def test_long_names_of_arms_are_not_cut(tmp_path):
    names = [f"M2,GDN:heads=6,SWA:heads=2:window={64 * (n + 1)}" for n in range(4)]
    chart = Chart("long", "t", "x", "y", tuple(Line(name, ((1.0, 2.0), (2.0, 1.0))) for name in names))
    (tmp_path / "report.html").write_text(to_html("t", [Section("s", charts=[chart])]), encoding="utf-8")
    body = seen(tmp_path, tmp_path)
    assert (body["drawn"], body["cut"]) == ("1", "")
