"""The dashboard's page in a real browser, over the development server: what it shows, refuses and survives."""

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from benchmarks.watching.chromium import VIEWS, Opened, axe, browser, open_page
from tests.dashboard import answers
from tests.dashboard.browsing import needs_chromium
from tests.dashboard.server import Server
from tests.dashboard.synthetic import Cluster

pytestmark = [pytest.mark.browser, needs_chromium, pytest.mark.timeout(300)]

Serve = Callable[..., Server]
Opening = Callable[..., Opened]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Starts development servers; `serve(size, period_s=.., **how)` takes what `Cluster` takes, too."""
    started: list[Server] = []

    def start(size: int = 16, period_s: float = 0.5, model: str = "smollm2", **how: Any) -> Server:
        server = Server(Cluster(size, **how), period_s=period_s, model=model)
        server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def opening(chromium: Browser) -> Iterator[Callable[..., Opened]]:
    """Opens pages; at the end none of them may have said anything on its console, or asked another host."""
    opened: list[Opened] = []

    def one(server: Server, **how: Any) -> Opened:
        opened.append(open_page(chromium, server.url, **how))
        return opened[-1]

    yield one
    for page in opened:
        said, foreign = page.said, page.foreign
        page.close()
        assert (said, foreign) == ([], [])


def until(condition: Callable[[], bool], what: str, page: Page, timeout_s: float = 20.0) -> None:
    """Waits for something outside the page, while the page goes on."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not within {timeout_s:g} s: {what}"
        page.wait_for_timeout(50)


# ------------------------------------------------------------------------------------------------------- every view


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, pytest.param(1920, marks=pytest.mark.nightly)])
def test_every_view_is_drawn_without_complaint(
    serve: Serve, opening: Opening, theme: str, width: int
) -> None:
    server = serve()
    opened = opening(server, theme=theme, width=width)
    page = opened.page
    for view in VIEWS:
        rest = server.cluster.worst[0]["id"] if view == "requests" else ""
        opened.go(view, rest)
        page.wait_for_timeout(600)
        assert axe(page) == [], view
        too_wide = page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        assert too_wide <= 0, view
        assert opened.said == [], view
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    red = int(re.findall(r"\d+", background)[0])
    assert (red < 60) == (theme == "dark")


def test_figures_are_those_of_the_stream(serve: Serve, opening: Opening) -> None:
    server = serve()
    opened = opening(server)
    opened.go("overview")
    page = opened.page
    server.paused = True
    page.wait_for_timeout(300)
    line = server.cluster.snapshot()["line"]
    state = page.locator(".state-line")
    expect(state).to_contain_text("ready")
    rate = line["requests_per_s"]
    expect(state).to_contain_text(f"{rate:.1f}/s" if rate >= 10 else f"{rate:.2f}/s")
    expect(state).to_contain_text(f"in flight{line['in_flight']:,.0f}")
    expect(page.locator(".state-more")).to_contain_text("join_shortest_queue")
    expect(page.locator(".chart")).to_have_count(9)


def test_each_chart_has_units_on_both_axes(serve: Serve, opening: Opening) -> None:
    opened = opening(serve())
    opened.go("overview")
    charts = opened.page.locator(".chart")
    for n in range(charts.count()):
        expect(charts.nth(n).locator(".panel-head .unit")).not_to_be_empty()
        expect(charts.nth(n).locator(".u-axis")).to_have_count(2)


# ------------------------------------------------------------------------------------------------------ sign in, roles


def test_a_key_signs_in_and_a_wrong_one_is_refused_in_words(serve: Serve, opening: Opening) -> None:
    server = serve()
    opened = opening(server, key=None)
    page = opened.page
    page.goto(server.url)
    page.get_by_label("Key").fill("guess")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("neither a viewer key nor an admin key")
    assert axe(page) == []
    page.get_by_label("Key").fill("viewer")
    page.keyboard.press("Enter")
    expect(page.locator(".badge")).to_have_text("viewer")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("Key")).to_have_value("")


def test_a_session_that_has_ended_leads_to_the_login(serve: Serve, opening: Opening) -> None:
    server = serve()
    opened = opening(server)
    opened.go("overview")
    server.forget_sessions()
    server.cut()
    expect(opened.page.get_by_role("alert")).to_contain_text("Your session has ended", timeout=15_000)
    expect(opened.page.get_by_label("Key")).to_be_visible()


def test_a_viewer_sees_all_and_changes_nothing(serve: Serve, opening: Opening) -> None:
    server = serve()
    opened = opening(server, key="viewer")
    page = opened.page
    for view, names in {
        "control": (
            "Review the change",
            "Plan only",
            "Set these numbers",
            "Set these bounds",
            "Drain",
            "Let the policy decide",
        ),
        "experiments": ("Check", "Start…"),
        "whatif": ("Simulate",),
    }.items():
        opened.go(view)
        expect(page.get_by_text("Your key may watch only").first).to_be_visible()
        for name in names:
            expect(page.get_by_role("button", name=name, exact=True)).to_be_disabled()
        assert axe(page) == [], view
    assert server.asked == []


# ------------------------------------------------------------------------------------------------------------- stream


def test_data_are_marked_as_stale_when_the_stream_is_silent(serve: Serve, opening: Opening) -> None:
    server = serve()
    opened = opening(server)
    opened.go("overview")
    page = opened.page
    expect(page.locator(".stale-line")).to_have_count(0)
    server.paused = True
    expect(page.locator(".stale-line")).to_contain_text("Stale:", timeout=15_000)
    expect(page.locator("html")).to_have_class("stale")
    assert axe(page) == []
    server.paused = False
    expect(page.locator(".stale-line")).to_have_count(0, timeout=15_000)
    expect(page.locator("html")).not_to_have_class("stale")


def test_before_the_first_data_nothing_is_called_absent(serve: Serve, opening: Opening) -> None:
    server = serve()
    server.refusing = True
    opened = opening(server)
    page = opened.page
    for view in ("engines", "requests", "transfers", "overview"):
        page.goto(f"{server.url}/#/{view}")
        expect(page.locator("#view").get_by_text("Waiting for the first data…").first).to_be_visible()
        expect(page.locator("#view")).not_to_contain_text(
            re.compile(r"No engine has|No request has|No pair of|Nothing has|0 engines|0 pairs")
        )
    server.refusing = False
    expect(page.locator("#view").get_by_text("Waiting for the first data…")).to_have_count(0, timeout=20_000)


def test_a_broken_stream_resumes_where_it_was(serve: Serve, opening: Opening) -> None:
    server = serve()
    opened = opening(server)
    opened.go("overview")
    until(lambda: server.snapshots == 1 and server.streams == 1, "the first stream", opened.page)
    server.refusing = True
    server.cut()
    opened.page.wait_for_timeout(1500)
    server.refusing = False
    until(lambda: server.resumed == 1, "a stream that resumes", opened.page)
    assert server.snapshots == 1
    assert without_gap(opened.page) == 1.0


def test_after_a_long_break_the_page_begins_anew(serve: Serve, opening: Opening) -> None:
    server = serve(period_s=0.02)
    opened = opening(server)
    opened.go("overview")
    until(lambda: server.snapshots == 1 and server.streams == 1, "the first stream", opened.page)
    server.refusing = True
    server.cut()
    opened.page.wait_for_timeout(3000)  # 150 deltas, and the server keeps 60
    server.refusing = False
    until(lambda: server.snapshots == 2, "a second snapshot", opened.page)
    assert without_gap(opened.page) == 1.0


def without_gap(page: Page) -> float:
    """Returns the largest distance of two points of the series that the page holds, in seconds."""
    return page.evaluate(
        """async () => {
          const { feed } = await import("/static/js/live.js");
          const t = feed.series.t;
          return Math.max(...t.slice(1).map((at, n) => at - t[n]));
        }"""
    )


# ------------------------------------------------------------------------------------------------------- text as text


def test_markup_in_names_is_shown_as_text(serve: Serve, opening: Opening) -> None:
    server = serve(hostile=True, model="<b onclick=alert(1)>model</b>")
    opened = opening(server)
    page = opened.page
    asked: list[str] = []
    page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.dismiss()))
    for view in VIEWS:
        opened.go(view)
        page.wait_for_timeout(300)
        assert (
            page.locator(
                "#app img:not([src='static/icon.svg']), #app i:not([class]), #app b[onclick]"
            ).count()
            == 0
        ), view
    expect(page.locator(".model")).to_have_text("<b onclick=alert(1)>model</b>")
    opened.go("requests")
    page.locator(".request-list a").first.click()
    expect(page.locator(".request-detail h3").first).to_contain_text("<img src=x onerror=alert(")
    opened.go("engines")
    expect(page.locator(".lane .node").first).to_have_text("<i>node</i>")
    assert asked == []


def test_what_is_absent_is_named_with_its_reason_and_is_no_zero(serve: Serve, opening: Opening) -> None:
    absent = {
        "scaling": "No autoscaler runs: `scaling` is not set.",
        "flow": "No flow agent runs: `flow` is not set.",
        "predictor": "No predictor is loaded.",
    }
    server = serve(absent=absent)
    opened = opening(server)
    page = opened.page
    opened.go("overview")
    for why in absent.values():
        expect(page.locator(".side")).to_contain_text(why)
    expect(page.locator(".chart", has_text="Engines").locator(".legend")).not_to_contain_text("planned")
    opened.go("control")
    expect(page.get_by_text("No autoscaler runs, so numbers are those of the configuration.")).to_be_visible()
    page.get_by_role("tab", name="Flow").click()
    expect(page.get_by_text("KV transfers are not scheduled.")).to_be_visible()
    opened.go("transfers")
    expect(page.get_by_text("KV transfers have no priority levels here.")).to_be_visible()


def test_transfers_that_do_not_exist_have_one_reason(serve: Serve, opening: Opening) -> None:
    opened = opening(serve(absent={"transfers": "All engines are colocated: no KV moves."}))
    opened.go("transfers")
    expect(opened.page.locator("#view")).to_contain_text("All engines are colocated: no KV moves.")
    expect(opened.page.locator("#view table")).to_have_count(0)


# ------------------------------------------------------------------------------------------------------------ control


def test_a_policy_is_changed_after_before_and_after_were_shown_and_undone(
    serve: Serve, opening: Opening
) -> None:
    server = serve()
    opened = opening(server)
    opened.go("control")
    page = opened.page
    page.get_by_role("tab", name="Decode").click()
    page.get_by_label("Policy", exact=True).select_option("netkv")
    page.get_by_label("step_base_s").fill("0.03")
    page.get_by_role("button", name="Review the change").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("composition")
    expect(dialog).to_contain_text("netkv")
    expect(dialog.get_by_role("row", name="decode.step_base_s")).to_contain_text("0.02→0.03")
    assert axe(page) == []
    dialog.get_by_role("button", name="Cancel").click()
    assert server.asked == []
    page.get_by_role("button", name="Review the change").click()
    dialog.get_by_role("button", name="Change", exact=True).click()
    expect(dialog).to_have_count(0)
    assert server.asked == [
        ("PUT", "/api/policy", {"decode": {"name": "netkv", "params": {"step_base_s": 0.03}}})
    ]
    log = page.locator("section", has_text="Audit log").last
    expect(log).to_contain_text("composition → netkv")
    log.get_by_role("button", name="Undo").click()
    expect(dialog).to_contain_text("Undo: policy")
    dialog.get_by_role("button", name="Undo").click()
    expect(log).to_contain_text("undone")
    assert server.asked[-1] == ("POST", "/api/undo", {"id": "c1"})
    expect(page.locator(".policies select").first).to_have_value("composition")


def test_a_policy_that_somebody_else_changes_is_followed_and_what_is_being_edited_stays(
    serve: Serve, opening: Opening
) -> None:
    server = serve()
    opened = opening(server)
    opened.go("control")
    page = opened.page
    page.get_by_role("tab", name="Decode").click()
    policy, field = page.get_by_label("Policy", exact=True), page.get_by_label("step_base_s")
    meanwhile = page.locator(".policies").get_by_role("status")
    expect(policy).to_have_value("composition")
    until(lambda: opened.seq() is not None, "data", page)
    page.wait_for_timeout(500)
    reads = server.policy_reads
    server.another_changes("decode", "netkv", step_base_s=0.03)
    expect(policy).to_have_value("netkv")
    expect(field).to_have_value("0.03")
    expect(page.get_by_role("button", name="Reset")).to_be_disabled()
    field.fill("0.05")
    server.another_changes("decode", "netkv", step_base_s=0.04, load_weight=2.5)
    expect(meanwhile).to_contain_text("Changed meanwhile: step_base_s 0.03 → 0.04, load_weight 1 → 2.5.")
    expect(field).to_have_value("0.05")
    expect(field).to_be_focused()
    # what was not touched follows, and is not put back by the change
    expect(page.get_by_label("load_weight")).to_have_value("2.5")
    assert axe(page) == []
    page.get_by_role("button", name="Review the change").click()
    changes = page.get_by_role("dialog").locator("tbody tr")
    expect(changes).to_have_count(1)
    expect(changes).to_contain_text("decode.step_base_s0.04→0.05")
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    server.another_changes("decode", "balance_route_0")
    expect(meanwhile).to_contain_text("policy netkv → balance_route_0")
    expect(policy).to_have_value("netkv")
    expect(field).to_have_value("0.05")
    page.get_by_role("button", name="Reset").click()
    expect(policy).to_have_value("balance_route_0")
    expect(meanwhile).to_have_count(0)
    # read once for each change, and not by the clock
    assert server.policy_reads == reads + 3


def test_policies_that_could_not_be_read_are_read_again(serve: Serve, opening: Opening) -> None:
    server = serve()
    server.unread = "The router is not connected."
    opened = opening(server)
    opened.go("control")
    policies = opened.page.get_by_role("region", name="Policies")
    expect(policies.get_by_role("alert")).to_contain_text("The router is not connected.")
    server.unread = None
    expect(policies.get_by_label("Policy", exact=True)).to_have_value("join_shortest_queue", timeout=20_000)


@pytest.mark.parametrize(("stage", "policy"), [("admission", "by_wait"), ("fairness", "none")])
def test_each_policy_of_the_router_has_a_form(
    serve: Serve, opening: Opening, stage: str, policy: str
) -> None:
    server = serve()
    opened = opening(server)
    opened.go("control")
    page = opened.page
    page.get_by_role("tab", name=stage.capitalize()).click()
    page.get_by_label("Policy", exact=True).select_option(policy)
    page.get_by_role("button", name="Review the change").click()
    page.get_by_role("dialog").get_by_role("button", name="Change", exact=True).click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert server.asked == [("PUT", "/api/policy", {stage: {"name": policy, "params": {}}})]


def test_a_parameter_that_is_no_number_is_refused_before_anything_is_sent(
    serve: Serve, opening: Opening
) -> None:
    server = serve()
    opened = opening(server)
    opened.go("control")
    page = opened.page
    page.get_by_role("tab", name="Dispatcher").click()
    field = page.locator(".params input").first
    name = field.get_attribute("aria-label")
    field.fill("many")
    page.get_by_role("button", name="Review the change").click()
    expect(page.get_by_role("alert")).to_contain_text(f"{name} must be")
    assert server.asked == []


def test_numbers_of_engines_are_planned_set_and_refused_in_the_servers_words(
    serve: Serve, opening: Opening
) -> None:
    server = serve()
    opened = opening(server)
    opened.go("control")
    page = opened.page
    page.get_by_label("engines of decode").fill("9")
    page.get_by_role("button", name="Plan only").click()
    expect(page.get_by_role("region", name="Plan")).to_contain_text("activate decode-8")
    expect(page.get_by_role("region", name="Plan")).to_contain_text("because decode = ceil(")
    assert server.asked[-1] == ("PUT", "/api/scale", {"counts": {"decode": 9}, "plan": True})
    page.get_by_role("button", name="Set these numbers").click()
    page.get_by_role("dialog").get_by_role("button", name="Set").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert server.asked[-1] == ("PUT", "/api/scale", {"counts": {"decode": 9}})
    page.get_by_label("engines of decode").fill("1")
    page.get_by_role("button", name="Set these numbers").click()
    page.get_by_role("dialog").get_by_role("button", name="Set").click()
    expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("below its group's min of 2")


def test_numbers_that_cannot_be_read_again_are_marked_as_stale_with_their_age_and_the_reason(
    serve: Serve, opening: Opening
) -> None:
    server = serve()
    opened = opening(server)
    opened.go("control")
    numbers = opened.page.get_by_role("region", name="Numbers of engines")
    numbers.get_by_label("engines of decode").fill("9")
    server.away = "The router is not connected."
    expect(numbers.get_by_role("status")).to_have_text(
        re.compile(r"Stale: this was read \d+ s ago\. The router is not connected\."), timeout=15_000
    )
    assert axe(opened.page) == []
    server.away = None
    expect(numbers.get_by_role("status")).to_have_count(0, timeout=15_000)
    # the form is the one that it was
    expect(numbers.get_by_label("engines of decode")).to_have_value("9")


def test_a_group_s_replicas_are_shown_by_duty_and_those_that_are_overdue_apart(
    serve: Serve, opening: Opening
) -> None:
    opened = opening(serve())
    opened.go("control")
    table = opened.page.get_by_role("group", name="Groups", exact=True)
    titles = ["Group", "Role", "Replicas", "Active", "Warm", "Starting", "Overdue", "Draining", "Set to"]
    expect(table.get_by_role("columnheader")).to_have_text(titles)
    cells = table.get_by_role("row", name="decode").get_by_role("cell")
    # 8 active and 1 warm are 9 of the 10 replicas that Serve is asked for
    expect(cells).to_have_text(["D decode", "10", "8", "1", "0", "1", "0", ""])
    expect(opened.page.get_by_role("region", name="Plan")).to_contain_text("see what they lack")


def test_a_number_typed_the_moment_the_dialog_closes_stays(serve: Serve, opening: Opening) -> None:
    opened = opening(serve())
    opened.go("control")
    page = opened.page
    number = page.get_by_label("engines of decode")
    number.fill("9")
    page.get_by_role("button", name="Set these numbers").click()
    page.evaluate(
        """() => new MutationObserver((_, observer) => {
            if (document.querySelector("dialog")) return;
            observer.disconnect();
            const number = document.querySelector("[aria-label='engines of decode']");
            number.value = "7";
            number.dispatchEvent(new Event("input", { bubbles: true }));
        }).observe(document.body, { childList: true, subtree: true })"""
    )
    page.get_by_role("dialog").get_by_role("button", name="Set").click()
    expect(number).to_have_value("7")
    # what the page does after it has drawn is over by then
    page.wait_for_timeout(500)
    expect(number).to_have_value("7")
    expect(page.get_by_role("button", name="Set these numbers")).to_be_enabled()


def test_bounds_and_the_warm_pool_are_planned_and_set_and_never_with_numbers(
    serve: Serve, opening: Opening
) -> None:
    server = serve()
    opened = opening(server)
    opened.go("control")
    page = opened.page
    page.get_by_label("max of decode", exact=True).fill("20")
    page.get_by_label("engines of decode").fill("9")
    expect(page.get_by_role("alert")).to_contain_text("one after the other")
    expect(page.get_by_role("button", name="Set these bounds")).to_be_disabled()
    page.get_by_label("engines of decode").fill("")
    page.get_by_label("warm of prefill", exact=True).fill("2.5")
    expect(page.get_by_role("alert")).to_contain_text("whole number")
    page.get_by_label("warm of prefill", exact=True).fill("2")
    asked = {"decode": {"max": 20}, "prefill": {"warm": 2}}
    page.get_by_role("button", name="Plan only").click()
    expect(page.get_by_role("region", name="Plan")).to_contain_text("nothing is changed")
    assert server.asked == [("PUT", "/api/scale", {"bounds": asked, "plan": True})]
    page.get_by_role("button", name="Set these bounds").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("row", name="decode.max")).to_contain_text("16→20")
    expect(dialog.get_by_role("row", name="prefill.warm")).to_contain_text("1→2")
    assert axe(page) == []
    dialog.get_by_role("button", name="Set", exact=True).click()
    expect(dialog).to_have_count(0)
    assert server.asked[-1] == ("PUT", "/api/scale", {"bounds": asked})
    expect(page.get_by_label("max of decode", exact=True)).to_have_attribute("placeholder", "20")
    bounds = page.get_by_role("group", name="Bounds").get_by_role("row", name="decode")
    expect(bounds).to_contain_text("2, 16, 1, 1")


def test_one_engine_changes_role_and_duty_and_drains(serve: Serve, opening: Opening) -> None:
    server = serve()
    opened = opening(server)
    opened.go("control")
    page = opened.page
    page.get_by_label("Engine", exact=True).fill("decode-2")
    dialog = page.get_by_role("dialog")
    page.get_by_label("Role", exact=True).select_option("prefill")
    expect(dialog).to_contain_text("decode→prefill")
    dialog.get_by_role("button", name="Change").click()
    page.get_by_role("button", name="Make warm").click()
    dialog.get_by_role("button", name="Make warm").click()
    page.get_by_role("button", name="Drain", exact=True).click()
    dialog.get_by_role("button", name="Drain").click()
    expect(dialog).to_have_count(0)
    path = "/api/engines/decode-2"
    assert server.asked == [
        ("PUT", path, {"role": "prefill"}),
        ("PUT", path, {"duty": "warm"}),
        ("POST", f"{path}/drain", {}),
    ]


# ------------------------------------------------------------------------------------------------------------ requests


def test_a_request_shows_where_its_time_went_and_why(serve: Serve, opening: Opening) -> None:
    server = serve()
    opened = opening(server)
    worst = server.cluster.worst[0]
    opened.go("requests", worst["id"])
    page = opened.page
    rows = page.locator(".waterfall .wf-row:not(.wf-head)")
    expect(rows).to_have_count(len(worst["parts"]))
    for n, part in enumerate(worst["parts"]):
        expect(rows.nth(n)).to_contain_text(part["name"])
        if part["engine"]:
            expect(rows.nth(n)).to_contain_text(part["engine"])
    # the transfer costs 0.004 s and the queue 0.02 * ln 2 = 0.0138629 s at the second best
    expect(page.locator(".decision").last).to_contain_text("0.0388629 = 0.004 + 0.0138629 + 0.021")
    expect(page.locator(".decision").first).to_contain_text("decode-3 (failure rate)")
    ranked = page.get_by_role("group", name="Ranking of decision 2").locator("tbody tr")
    expect(ranked.first).to_have_class("picked")


def test_an_id_that_is_not_kept_says_so(serve: Serve, opening: Opening) -> None:
    opened = opening(serve())
    opened.go("requests")
    opened.page.get_by_label("Id", exact=True).fill("nobody/knows%this")
    opened.page.keyboard.press("Enter")
    expect(opened.page.locator(".request-detail")).to_contain_text(
        "No decision is known for 'nobody/knows%this'."
    )


def test_a_request_that_is_looked_up_before_its_end_is_shown_after_it(serve: Serve, opening: Opening) -> None:
    server = serve()
    server.paused = True
    opened = opening(server)
    # the name of the next request that ends
    opened.go("requests", f"chat-{server.cluster._numbers + 1:06d}-7f3a91c2")
    expect(opened.page.locator(".request-detail")).to_contain_text("does not hold this request")
    server.paused = False
    expect(opened.page.locator(".waterfall")).to_be_visible(timeout=20_000)


# --------------------------------------------------------------------------------------------- experiments and what-if


def test_without_an_ingress_for_them_there_are_no_experiments(serve: Serve, opening: Opening) -> None:
    server = serve()
    server.experiments = False
    opened = opening(server)
    for view, what in (("experiments", "Experiments"), ("whatif", "What-if questions")):
        opened.go(view)
        absent = opened.page.locator("#view .absent")
        expect(absent).to_contain_text(f"{what} are off here.")
        expect(absent).to_contain_text("dashboard.experiments.url")


def test_an_experiment_is_edited_checked_started_watched_and_compared(serve: Serve, opening: Opening) -> None:
    server = serve()
    opened = opening(server)
    opened.go("experiments")
    page = opened.page
    editor = page.get_by_role("textbox", name="Experiment file")
    written = editor.input_value()
    editor.fill("name: broken\n")
    page.get_by_role("button", name="Start…").click()
    expect(page.get_by_role("alert")).to_contain_text("load.phases is missing")
    expect(page.get_by_role("dialog")).to_have_count(0)
    editor.fill(written)
    page.get_by_role("button", name="Check", exact=True).click()
    expect(page.get_by_text("1,650 requests in 2 min 00 s")).to_be_visible()
    page.get_by_role("button", name="Start…").click()
    page.get_by_role("dialog").get_by_role("button", name="Start").click()
    page.wait_for_url("**/#/experiments/runs/*")
    assert server.asked[-1] == ("POST", "/api/experiments/start", {"text": written})
    expect(page.locator(".progress-line .state")).to_contain_text("running")
    expect(page.locator(".progress-line .state")).to_contain_text("done", timeout=40_000)
    with page.expect_download() as saved:
        page.get_by_role("link", name="Report").click()
    assert saved.value.suggested_filename == "report.html"
    boxes = page.locator(".run-rows input")
    boxes.nth(0).check()
    boxes.nth(1).check()
    page.get_by_role("button", name="Compare 2").click()
    table = page.get_by_role("group", name="Figures of the runs")
    expect(table.get_by_role("row", name="attainment")).to_contain_text("+2.8 %")
    expect(table.locator(".clear")).to_have_count(2)
    expect(table.get_by_role("row", name="TPOT")).to_contain_text("no interval")
    legend = page.locator(".chart").first.locator(".legend li")
    expect(legend).to_have_count(4)
    # two classes of each run: a column's dot has the colour of its lines
    colour = "(e, name) => getComputedStyle(e)[name]"
    dots = [one.evaluate(colour, "backgroundColor") for one in table.locator("thead .dot").all()]
    lines = [one.evaluate(colour, "color") for one in legend.locator(".swatch").all()]
    assert dots == lines[::2] == lines[1::2] and len(set(dots)) == 2
    expect(page.locator(".run-rows .dot")).to_have_count(0)
    assert axe(page) == []


def test_a_what_if_is_simulated_and_says_whether_to_trust_it(serve: Serve, opening: Opening) -> None:
    server = serve()
    opened = opening(server)
    opened.go("whatif")
    page = opened.page
    page.get_by_label("Name").fill("more prefill")
    page.get_by_label("Set").fill("nonsense")
    page.get_by_role("button", name="Simulate").click()
    expect(page.get_by_role("alert")).to_contain_text("KEY = VALUE")
    page.get_by_label("Set").fill("cluster.engines.prefill.count = 7\npolicies.decode.name = netkv")
    page.get_by_role("button", name="Simulate").click()
    expect(page.get_by_text("within 15 % of what was measured")).to_be_visible(timeout=20_000)
    changes = [
        {"name": "more prefill", "set": {"cluster.engines.prefill.count": 7, "policies.decode.name": "netkv"}}
    ]
    base = server.asked[-1][2]["base"]
    assert server.asked[-1][2]["changes"] == changes and base
    # what was read stays: after a look at another view the next question is about the same base
    opened.go("overview")
    opened.go("whatif")
    expect(page.get_by_role("textbox", name="Base file")).to_have_value(re.compile("cluster:"))
    assert [path for _, path, _ in server.asked].count("/api/whatif/base") == 1
    row = page.get_by_role("group", name="Figures side by side").get_by_role("row", name="KV usage")
    expect(row.get_by_role("cell").nth(1)).to_have_text("–")  # not measured: a dash, no zero
    assert axe(page) == []


def test_a_base_that_is_read_anew_replaces_what_was_typed_and_one_that_cannot_be_read_replaces_nothing(
    serve: Serve, opening: Opening
) -> None:
    server = serve()
    opened = opening(server)
    opened.go("whatif")
    page = opened.page
    editor, anew = (
        page.get_by_role("textbox", name="Base file"),
        page.get_by_role("button", name="Read anew"),
    )
    simulate = page.get_by_role("button", name="Simulate")
    editor.fill("typed: 1\n")
    server.reading = True
    server.base = {**answers.BASE, "base": "fedcba9876543210", "text": "anew: 1\n"}
    anew.click()
    expect(editor).not_to_be_editable()
    expect(simulate).to_be_disabled()
    server.reading = False
    expect(editor).to_have_value("anew: 1\n")
    simulate.click()
    until(lambda: server.asked[-1][1] == "/api/whatif/start", "a question", page)
    assert server.asked[-1][2] == {"text": "anew: 1\n", "changes": [], "base": "fedcba9876543210"}
    server.base = None
    anew.click()
    expect(page.get_by_text("No request has ended lately.")).to_be_visible()
    expect(editor).to_have_value("anew: 1\n")
    expect(editor).to_be_editable()
    expect(simulate).to_be_enabled(timeout=20_000)


# ------------------------------------------------------------------------------------------------------ keyboard, theme


def test_views_are_reached_by_keys_and_the_focus_is_seen(serve: Serve, opening: Opening) -> None:
    opened = opening(serve())
    opened.go("overview")
    page = opened.page
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    focused = page.locator(":focus")
    expect(focused).to_have_attribute("aria-selected", "true")
    assert focused.evaluate("e => getComputedStyle(e).outlineStyle") == "solid"
    page.keyboard.press("ArrowRight")
    expect(page).to_have_url(re.compile("#/engines$"))
    expect(page.locator(":focus")).to_have_text("Engines")
    page.keyboard.press("End")
    expect(page).to_have_url(re.compile("#/whatif$"))
    page.keyboard.press("ArrowRight")
    expect(page).to_have_url(re.compile("#/overview$"))


def test_the_details_of_an_engine_are_opened_and_closed_by_keys_and_the_focus_stays(
    serve: Serve, opening: Opening
) -> None:
    opened = opening(serve())
    opened.go("engines")
    page = opened.page
    lane = page.get_by_role("button", name="colocated-1", exact=True)
    lane.focus()
    top = page.locator(".lanes").evaluate("e => e.scrollTop")
    page.keyboard.press("Enter")
    details = page.get_by_role("region", name="Details of colocated-1")
    expect(details).to_be_visible()
    # a lane that is in sight stays where it is
    assert page.locator(".lanes").evaluate("e => e.scrollTop") == top
    details.get_by_role("button", name="Close").focus()
    page.keyboard.press("Enter")
    expect(details).to_have_count(0)
    expect(lane).to_be_focused()


def test_the_theme_is_switched_and_kept(serve: Serve, opening: Opening) -> None:
    opened = opening(serve(), theme="dark")
    opened.go("overview")
    page = opened.page
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_label("Theme").select_option("light")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert light != dark
    page.reload()
    page.wait_for_selector("#view .panel")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == light


# ----------------------------------------------------------------------------------------------------- 1,024 engines


def test_a_thousand_engines_are_shown_with_only_the_lanes_in_sight(serve: Serve, opening: Opening) -> None:
    server = serve(1024, period_s=1.0)
    opened = opening(server, width=1920)
    opened.go("engines")
    page = opened.page
    expect(page.get_by_text("1,024 engines in 8 groups")).to_be_visible()
    lanes = page.locator(".lanes .lane")
    assert 5 < lanes.count() < 60
    box = page.locator(".lanes")
    box.evaluate("e => e.scrollTo(0, e.scrollHeight)")
    last = server.cluster.engines
    expect(page.locator(".lanes")).to_contain_text(
        max((e for e in last if e.startswith("prefill-2")), key=lambda e: int(e.split("-")[-1]))
    )
    page.get_by_label("Find").fill("prefill-1-7")
    expect(page.locator(".lane .id").first).to_have_text("prefill-1-7")
    assert axe(page) == []


def test_rows_that_have_gone_are_given_back(serve: Serve, opening: Opening) -> None:
    """The list of the latest requests changes with each update; what leaves it must leave the memory, too."""
    server = serve(period_s=0.05)
    opened = opening(server)
    opened.go("requests")
    cdp = opened.context.new_cdp_session(opened.page)
    cdp.send("Performance.enable")

    def nodes() -> float:
        cdp.send("HeapProfiler.collectGarbage")
        return next(
            one["value"] for one in cdp.send("Performance.getMetrics")["metrics"] if one["name"] == "Nodes"
        )

    until(lambda: server.cluster.seq > 960, "60 updates", opened.page)
    first, before = server.cluster.seq, nodes()
    until(lambda: server.cluster.seq > first + 100, "100 updates more", opened.page)
    # 100 updates bring about 200 rows of some 20 nodes each; ten rows more or less are in the page
    assert nodes() < before + 500
