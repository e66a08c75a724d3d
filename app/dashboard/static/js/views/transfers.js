// Transfers: KV between engines, by network tier and priority level, by pair, and the slowest ones.

import { html, useState } from "../lib.js";
import { LiveChart, colourOf } from "../chart.js";
import { orWaiting, useFeed } from "../live.js";
import { Absent, Bar, Panel, Table } from "../ui.js";
import { NONE, bytes, bytesRate, clock, count, known, percent, seconds } from "../format.js";

const MOST_PAIRS = 200;

const PAIRS = [
  { name: "from", title: "From" }, { name: "to", title: "To" }, { name: "tier", title: "Tier", number: true },
  { name: "now", title: "Now", number: true }, { name: "learnt", title: "Learnt", number: true }, { name: "configured", title: "Configured", number: true },
  { name: "ratio", title: "Learnt of configured", class: "wide-cell" }, { name: "transfers", title: "Transfers", number: true },
];
const SLOWEST = [
  { name: "id", title: "Request" }, { name: "at", title: "At", number: true }, { name: "from", title: "From" }, { name: "to", title: "To" },
  { name: "bytes", title: "Size", number: true }, { name: "seconds", title: "Took", number: true }, { name: "held", title: "Held", number: true },
  { name: "level", title: "Level", number: true }, { name: "tier", title: "Tier", number: true },
];

const last = (name) => name.slice(name.lastIndexOf("/") + 1);
const series = (names, word) => names.map((name, n) => ({ label: `${word} ${last(name)}`, colour: colourOf(n), lines: [{ name, dash: n % 2 ? [4, 3] : undefined }] }));

export function Transfers() {
  const feed = useFeed();
  const [find, setFind] = useState("");
  if (feed.absent.transfers) return html`<${Absent} what="There are no transfers to show." why=${feed.absent.transfers} />`;
  const { pairs = [], slowest = [], levels = [], seconds: took, held_s: held } = feed.transfers ?? {};
  const wanted = find.trim().toLowerCase();
  const fitting = pairs.filter((pair) => !wanted || `${pair.from} ${pair.to}`.toLowerCase().includes(wanted));
  const chosen = [...fitting].sort((a, b) => (b.bytes_per_s ?? 0) - (a.bytes_per_s ?? 0)).slice(0, MOST_PAIRS);
  return html`<div class="transfers">
    <${LiveChart} window_s=${300} title="KV moved by network tier" unit="bytes/s" format=${bytesRate}
      groups=${series(feed.below("bytes_per_s/tier/"), "tier")} empty=${orWaiting("Nothing has been moved yet.")} />
    ${feed.absent.flow
      ? html`<${Panel} title="KV moved by priority level"><${Absent} what="KV transfers have no priority levels here." why=${feed.absent.flow} /><//>`
      : html`<${LiveChart} window_s=${300} title="KV moved by priority level" unit="bytes/s" format=${bytesRate}
          groups=${series(feed.below("bytes_per_s/level/"), "level")} empty=${orWaiting("Nothing has been moved yet.")} />`}
    <${Panel} title="Time of a transfer" name="figures-panel">
      <div class="figures">
        <${Figure} name="transfer, median" value=${seconds(took?.p50)} /><${Figure} name="transfer, 95th percentile" value=${seconds(took?.p95)} />
        <${Figure} name="held back, median" value=${seconds(held?.p50)} /><${Figure} name="held back, 95th percentile" value=${seconds(held?.p95)} />
      </div>
      ${levels.length > 0 && html`<${Table} label="Priority levels" columns=${[
        { name: "level", title: "Level", number: true }, { name: "rate", title: "Now", number: true }, { name: "held", title: "Held now", number: true }, { name: "time", title: "Held for, p95", number: true }]}
        rows=${levels.map((one) => ({ key: one.level, level: one.level, rate: live(bytesRate(one.bytes_per_s)), held: live(count(one.held)), time: live(seconds(one.held_s)) }))} />`}
    <//>
    <${Panel} title="Bandwidth by pair" wide=${true} note=${feed.transfers && `${count(pairs.length)} ${pairs.length === 1 ? "pair" : "pairs"}${fitting.length > MOST_PAIRS ? `, the ${MOST_PAIRS} busiest shown` : ""}`}
      actions=${html`<label class="inline">Find <input type="search" value=${find} placeholder="engine or node" onInput=${(e) => setFind(e.target.value)} /></label>`}>
      <${Table} label="Bandwidth by pair" columns=${PAIRS} empty=${pairs.length ? "No pair fits." : orWaiting("No pair of engines has moved KV yet.")} rows=${chosen.map((pair) => {
        const ratio = known(pair.learnt_bytes_per_s) && pair.configured_bytes_per_s ? pair.learnt_bytes_per_s / pair.configured_bytes_per_s : null;
        return {
          key: `${pair.from} ${pair.to}`, from: clipped(pair.from), to: clipped(pair.to), tier: pair.tier ?? NONE, now: live(bytesRate(pair.bytes_per_s)), learnt: bytesRate(pair.learnt_bytes_per_s),
          configured: known(pair.configured_bytes_per_s) ? bytesRate(pair.configured_bytes_per_s) : html`<span class="note">not configured</span>`,
          ratio: html`<${Bar} share=${ratio} text=${percent(ratio, 0)} kind=${ratio !== null && ratio < 0.5 && "low"} label="learnt of configured bandwidth" />`, transfers: count(pair.transfers),
        };
      })} />
    <//>
    <${Panel} title="Slowest transfers" wide=${true}>
      <${Table} label="Slowest transfers" columns=${SLOWEST} empty=${orWaiting("Nothing has been moved yet.")} rows=${slowest.map((one) => ({
        key: `${one.id} ${one.at} ${one.to}`, id: html`<a href=${`#/requests/${encodeURIComponent(one.id)}`} class="mono">${one.id}</a>`, at: clock(one.at), from: clipped(one.from), to: clipped(one.to),
        bytes: bytes(one.bytes), seconds: seconds(one.seconds), held: seconds(one.held_s), level: one.level ?? NONE, tier: one.tier ?? NONE,
      }))} />
    <//>
  </div>`;
}

const clipped = (name) => html`<span class="clip" title=${name}>${name}</span>`;
const live = (text) => html`<span class="live">${text}</span>`;
export const Figure = ({ name, value, note }) => html`<div class="figure"><span class="name">${name}</span><span class="value live">${value}</span>${note && html`<span class="note">${note}</span>`}</div>`;
