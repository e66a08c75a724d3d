// Overview: what clients feel, what flows, and what the fleet does, over the last minutes.

import { html, useState } from "../lib.js";
import { LiveChart, colourOf } from "../chart.js";
import { orWaiting, useFeed } from "../live.js";
import { Absent, Empty, Tabs } from "../ui.js";
import { bytesRate, clock, count, percent, rate, seconds } from "../format.js";

const WINDOWS = [["60", "1 min"], ["300", "5 min"], ["900", "15 min"]];
const DASH = [4, 3];

const quantiles = (figure, classes) => classes.map(({ name, colour }) => ({
  label: name, colour,
  lines: [{ name: `${figure}_p50_s/${name}`, dash: DASH, width: 1.25 }, { name: `${figure}_p95_s/${name}`, width: 2 }],
}));

const one = (label, name, colour, extra) => ({ label, colour, lines: [{ name, ...extra }] });

const share = (value) => percent(value, 0);

export function Overview() {
  const feed = useFeed();
  const [window_s, setWindow] = useState("300");
  const [hidden, setHidden] = useState([]);
  const all = feed.classes.map((name, n) => ({ name, colour: colourOf(n) }));
  const shown = all.filter(({ name }) => !hidden.includes(name));
  const toggle = (name) => setHidden(hidden.includes(name) ? hidden.filter((one) => one !== name) : [...hidden, name]);
  const objectives = (key, what) => shown.filter(({ name }) => feed.slo[name]?.[key]).map(({ name, colour }) => ({
    value: feed.slo[name][key], label: `${what} ${seconds(feed.slo[name][key])}`, colour,
  }));
  const common = { window_s: Number(window_s) };
  return html`<div class="view-head">
      <${Tabs} tabs=${WINDOWS} at=${window_s} onChange=${setWindow} label="Time shown" panel="view" />
      <div class="chips" role="group" aria-label="Classes shown">${all.map(({ name, colour }) => html`<button type="button" key=${name} class="chip"
        aria-pressed=${String(!hidden.includes(name))} onClick=${() => toggle(name)}><span class="dot" style=${{ background: `var(${colour})` }}></span>${name}</button>`)}</div>
      <span class="note" title="quantiles and attainment are over the requests that ended in the last 15 s">Dashed: median (p50), solid: p95, dotted: objective. Triangles: events.</span>
    </div>
    <div class="overview">
      <div class="charts">
        <${LiveChart} ...${common} title="Time to first token" unit="s" note="p50 / p95" format=${seconds}
          groups=${quantiles("ttft", shown)} objectives=${objectives("ttft_s", "SLO")} />
        <${LiveChart} ...${common} title="Time per output token" unit="s" note="p50 / p95" format=${seconds}
          groups=${quantiles("tpot", shown)} objectives=${objectives("tpot_s", "SLO")} />
        <${LiveChart} ...${common} title="SLO attainment" unit="share of requests" format=${share} legendFormat=${percent} range=${attainmentRange}
          groups=${shown.map(({ name, colour }) => one(name, `attainment/${name}`, colour))} />
        <${LiveChart} ...${common} title="Requests" unit="1/s" format=${rate} groups=${[
          one("ended", "requests_per_s", "--s1"), one("errors", "errors_per_s", "--s2", { dash: DASH }),
          one("retries", "retries_per_s", "--s4", { dash: [1, 2] }), one("migrations", "migrations_per_s", "--s3", { dash: [6, 2, 1, 2] })]} />
        <${LiveChart} ...${common} title="Tokens" unit="1/s" format=${rate}
          groups=${[one("output", "tokens_per_s", "--s1"), one("prompt", "prompt_tokens_per_s", "--s3", { dash: DASH })]} />
        <${LiveChart} ...${common} title="Waiting and running" unit="requests" format=${count} whole=${true} groups=${[
          one("queue", "queued", "--s2"), one("pool", "pool", "--s4", { dash: DASH }), one("in flight", "in_flight", "--s1"),
          one("leases", "leases", "--s3", { dash: [1, 2] })]} />
        <${LiveChart} ...${common} title="KV in use" unit="share of blocks" format=${share} legendFormat=${percent} range=${() => [0, 1]}
          groups=${[one("mean", "kv_usage", "--s1"), one("fullest engine", "kv_usage_max", "--s2", { dash: DASH })]} />
        <${LiveChart} ...${common} title="Engines" unit="engines" format=${count} whole=${true} groups=${[
          one("active", "engines_active", "--s1"), one("warm", "engines_warm", "--s3", { dash: DASH }),
          ...(feed.absent.scaling ? [] : [one("planned", "engines_planned", "--s2", { dash: [1, 2] })])]}
          note=${feed.absent.scaling ? "no plan: scaling is off" : undefined} />
        <${LiveChart} ...${common} title="KV moved" unit="bytes/s" format=${bytesRate} groups=${[one("all transfers", "kv_bytes_per_s", "--s1")]} />
      </div>
      <aside class="side">
        <${Events} events=${feed.events} />
        <${NotThere} absent=${feed.absent} />
      </aside>
    </div>`;
}

// From just below the lowest value up to all requests.
const attainmentRange = (low) => [typeof low === "number" && low < 0.9 ? Math.max(0, Math.floor(low * 10 - 0.5) / 10) : 0.9, 1.002];

const EVENT_WORDS = {
  policy: "policy", plan: "plan", engine_up: "engine up", engine_down: "engine down", engine_state: "engine", engine_role: "role", retry: "retry",
  migration: "migration", router_lost: "router lost", router_found: "router", ingress_lost: "ingress lost", ingress_found: "ingress", admin: "change", experiment: "experiment",
};

function Events({ events }) {
  const [level, setLevel] = useState("all");
  const chosen = (level === "all" ? events : events.filter((event) => event.level !== "info")).slice(-60).reverse();
  return html`<section class="panel events" aria-label="Events">
    <header class="panel-head"><h2>Events</h2><span class="grow"></span>
      <${Tabs} tabs=${[["all", "all"], ["trouble", "trouble"]]} at=${level} onChange=${setLevel} label="Events shown" /></header>
    ${chosen.length === 0
      ? html`<${Empty}>${events.length ? "No trouble among the latest events." : orWaiting("Nothing has happened since the dashboard started.")}<//>`
      : html`<ol class="event-list" tabindex="0" aria-label="Latest events">${chosen.map((event) => html`<li key=${event.seq} class=${`event ${event.level}`}>
          <time>${clock(event.at)}</time><span class="kind">${EVENT_WORDS[event.kind] ?? event.kind}</span><span class="text">${event.text}</span></li>`)}</ol>`}
  </section>`;
}

const PART_WORDS = { scaling: "Autoscaler", flow: "Flow scheduler", transfers: "KV transfers", predictor: "Length predictor" };

function NotThere({ absent }) {
  const parts = Object.entries(absent);
  return parts.length > 0 && html`<section class="panel" aria-label="Not there">
    <header class="panel-head"><h2>Not there</h2></header>
    ${parts.map(([name, why]) => html`<${Absent} key=${name} what=${PART_WORDS[name] ?? name} why=${why} />`)}
  </section>`;
}
