// The line of state above all views: whether all is well, in figures, and what is not, in words with what to do.

import { html } from "./lib.js";
import { age_s, useFeed, useLink } from "./live.js";
import { Message } from "./ui.js";
import { NONE, clock, count, percent, rate, seconds } from "./format.js";

const ORDER = ["ready", "active", "warm", "starting", "draining", "quarantined", "stalled", "down"];
const TROUBLE = new Set(["quarantined", "stalled", "down"]);

export function StateLine() {
  const feed = useFeed(), link = useLink();
  const line = feed.line;
  document.documentElement.classList.toggle("stale", link.stale);
  if (!line) return html`<div class="state-line"><p class="empty">${link.reason ? `No data yet: ${link.reason}. Trying again…` : "Waiting for the first data…"}</p></div>`;
  const objectives = Object.entries(line.attainment ?? {});
  const engines = Object.entries(line.engines ?? {}).filter(([, n]) => n > 0).sort(([a], [b]) => ORDER.indexOf(a) - ORDER.indexOf(b));
  const policies = Object.entries(line.policies ?? {}).filter(([, name]) => name);
  const plan = feed.absent.scaling ? null : !line.plan ? "none yet" : Object.entries(line.plan).filter(([, n]) => n > 0).map(([role, n]) => `${n} ${role}`).join(", ");
  return html`<div class="state-line" aria-label="State" role="region">
      <div class=${`cell ready ${line.ready ? "ok" : "error"}`}><span class="name">state</span><span class="value live"><span aria-hidden="true">${line.ready ? "●" : "✕"}</span> ${line.ready ? "ready" : "not ready"}</span></div>
      <div class="cell"><span class="name">attainment</span><span class="value live">${objectives.length === 0 ? NONE : objectives.map(([name, share], n) => html`<span key=${name} class="pair">${n > 0 && " "}<small>${name}</small> ${percent(share)}</span>`)}</span></div>
      <${Cell} name="requests" value=${rate(line.requests_per_s)} unit="/s" />
      <${Cell} name="output tokens" value=${rate(line.tokens_per_s)} unit="/s" />
      <${Cell} name="queue" value=${count(line.queued)} />
      <${Cell} name="pool" value=${count(line.pool)} />
      <${Cell} name="in flight" value=${count(line.in_flight)} />
      <${Cell} name="leases" value=${count(line.leases)} />
      <div class="cell"><span class="name">engines</span><span class="value live">${engines.length === 0 ? "none" : engines.map(([state, n]) => html`<span key=${state} class=${TROUBLE.has(state) ? "pair trouble" : "pair"}>${TROUBLE.has(state) ? "▲ " : ""}${count(n)} <small>${state}</small></span>`)}</span></div>
      <div class="cell"><span class="name">router</span><span class="value live">${line.router?.connected ? "connected" : html`<span class="trouble">✕ away</span>`}${line.router?.fallback > 0 && html` <small class="trouble">${count(line.router.fallback)} decide alone</small>`}</span></div>
    </div>
    <div class="state-more">
      ${policies.map(([stage, name]) => html`<span key=${stage}>${stage} policy <b>${name}</b></span>`)}
      <span>plan <b>${plan ?? "none: no autoscaler"}</b></span><span>ingresses <b>${count(line.ingresses)}</b></span>
      <span class="clock">data of <b>${clock(feed.at)}</b></span>
    </div>
    ${link.stale && html`<div class="stale-line" role="alert"><b>Stale:</b> these figures are ${seconds(Math.round(age_s()))} old, of ${clock(feed.at)}. ${link.reason ? `Reason: ${link.reason}. Connecting again…` : "The stream is open, and nothing comes."}</div>`}
    ${!line.ready && line.detail && html`<${Message} level="error">${line.detail}<//>`}
    ${(line.warnings ?? []).map((warning, n) => html`<${Message} key=${n} level=${warning.level === "error" ? "error" : "warn"} role="status"><b>${warning.text}</b>${warning.do && html` <span>${warning.do}</span>`}<//>`)}`;
}

const Cell = ({ name, value, unit }) => html`<div class="cell"><span class="name">${name}</span><span class="value live">${value}${unit && value !== NONE && html`<small>${unit}</small>`}</span></div>`;
