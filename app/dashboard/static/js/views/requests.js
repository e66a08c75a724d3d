// Requests: the latest and the worst, where the time of one went, and why the router decided as it did.

import { html, useEffect, useState } from "../lib.js";
import { get } from "../api.js";
import { six, stageOf, termsOf, valued, withNumbers } from "../explain.js";
import { orWaiting, useFeed } from "../live.js";
import { Empty, Message, Panel, Read, State, Table, Tabs, classes, useRead } from "../ui.js";
import { NONE, bytes, clock, count, known, number, seconds, short, words } from "../format.js";

const LISTS = [["latest", "Latest"], ["worst", "Worst"]];
const MOST_RANKED = 12, WITH_NUMBERS = 3;
const AGAIN_MS = 2000; // between two looks for a request that is not held: it may run, or have ended a moment ago

export function Requests({ rest, go }) {
  const feed = useFeed();
  const [list, setList] = useState("latest");
  const [find, setFind] = useState("");
  const [frozen, freeze] = useState(null);
  const requests = list === "latest" ? frozen ?? feed.requests.latest : feed.requests.worst;
  const submit = (event) => {
    event.preventDefault();
    if (find.trim()) go("requests", find.trim());
  };
  return html`<div class="requests">
    <section class="panel request-list" aria-label="Requests">
      <header class="panel-head">
        <${Tabs} tabs=${LISTS} at=${list} onChange=${setList} label="Which requests" />
        ${list === "latest" && html`<button type="button" onClick=${() => freeze(frozen ? null : feed.requests.latest)}>
          ${frozen ? "Go on" : "Hold"}</button>`}
        <form onSubmit=${submit} class="inline"><label class="inline">Id <input type="search" class="mono" value=${find} placeholder="x-request-id" onInput=${(e) => setFind(e.target.value)} /></label>
          <button type="submit">Show</button></form>
      </header>
      ${requests.length === 0
        ? html`<${Empty}>${orWaiting(list === "latest" ? "No request has ended since the dashboard started." : "No request has ended in the last 15 minutes.")}<//>`
        : html`<div class="table-box tall" tabindex="0" role="group" aria-label="Requests"><table class="pick">
          <thead><tr><th scope="col">Request</th><th scope="col">Result</th><th scope="col" class="n">TTFT</th>
            <th scope="col" class="n">TPOT</th><th scope="col" class="n">Whole</th><th scope="col" class="n">Tokens</th></tr></thead>
          <tbody>${requests.map((one) => html`<tr key=${one.id} class=${one.id === rest && "picked"}>
            <td class="request-id"><a class="mono" href=${`#/requests/${encodeURIComponent(one.id)}`} title=${one.id}
              aria-current=${one.id === rest ? "true" : undefined}>${one.id}</a><span class="note"><time>${clock(one.at)}</time> ${one.class ?? ""}</span></td>
            <td><${Result} request=${one} /></td><td class="n">${seconds(one.ttft_s)}</td><td class="n">${seconds(one.tpot_s)}</td>
            <td class="n">${seconds(one.e2e_s)}</td><td class="n">${count(one.prompt_tokens)} → ${count(one.output_tokens)}</td>
          </tr>`)}</tbody></table></div>`}
    </section>
    <div class="request-detail">${rest
      ? html`<${OneRequest} key=${rest} id=${rest} />`
      : html`<${Panel} title="One request"><${Empty}>Choose a request to see where its time went and why each engine was chosen. An id from a client's answer works, too.<//><//>`}</div>
  </div>`;
}

function Result({ request }) {
  if (request.status && request.status >= 400) return html`<span class="state error"><span aria-hidden="true">✕</span> ${request.status}</span>`;
  if (request.result) return html`<${State} state=${RESULTS[request.result] ?? words(request.result)} />`;
  return html`<span class="note">no objective</span>`;
}

// What became of the objectives, in the words of the metrics; a miss is named by what was missed.
const RESULTS = { ttft: "TTFT missed", tpot: "TPOT missed" };

function OneRequest({ id }) {
  const read = useRead(() => get(`/api/requests/${encodeURIComponent(id)}`), id, AGAIN_MS, (answer) => answer.request !== null);
  return html`<${Read} read=${read} what="Asking for the request">${(answer) => html`
    ${answer.request
      ? html`<${Whole} request=${answer.request} />`
      : html`<${Panel} title="One request"><h3 class="mono break">${id}</h3><${Empty}>The dashboard does not hold this request: it keeps the latest and the worst that have ended. It goes on looking.<//><//>`}
    <${Explain} explain=${answer.explain} message=${answer.explain_message} />`}<//>`;
}

// --------------------------------------------------------------------------------------------------------- waterfall

const PARTS = {
  queue: ["queue", "waits for a prefill engine"], prefill: ["prefill", "the prompt is computed"], pool: ["pool", "waits for a decode engine"],
  transfer: ["transfer", "its KV is moved"], decode: ["decode", "tokens are made"], retry: ["retry", "again, after a failure before the first token"],
  migration: ["migration", "goes on at another engine"],
};

function Whole({ request }) {
  const figures = [
    ["first token", seconds(request.ttft_s)], ["per token", seconds(request.tpot_s)], ["whole", seconds(request.e2e_s)],
    ["prompt", `${count(request.prompt_tokens)} tokens`], ["cached", `${count(request.cached_tokens)} tokens`], ["output", `${count(request.output_tokens)} tokens`],
  ];
  return html`<${Panel} title="Where the time went" note=${`began ${clock(request.at, 3)}, ${request.class ?? "no class"}, status ${request.status ?? NONE}`} actions=${html`<${Result} request=${request} />`}>
    <h3 class="mono break">${request.id}</h3>${request.trace_id && html`<p class="note">trace <span class="mono">${request.trace_id}</span></p>`}
    <div class="figures">${figures.map(([name, value]) => html`<div class="figure" key=${name}><span class="name">${name}</span><span class="value">${value}</span></div>`)}</div>
    <${Waterfall} request=${request} />
  <//>`;
}

export function Waterfall({ request }) {
  const parts = request.parts ?? [];
  if (!parts.length) return html`<${Empty}>No part of this request was recorded.<//>`;
  const end = Math.max(request.e2e_s ?? 0, ...parts.map((part) => part.end_s ?? part.start_s ?? 0)) || 1;
  const at = (value) => `${(100 * value) / end}%`;
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => share * end);
  return html`<div class="waterfall" role="table" aria-label="Parts of the request">
    <div class="wf-row wf-head" role="row"><span role="columnheader">part</span><span role="columnheader">engine</span>
      <span class="wf-scale" role="columnheader" aria-label="when">${ticks.map((tick, n) => html`<span key=${n} style=${{ left: at(tick) }} class=${n === 0 ? "first" : n === 4 ? "last" : ""}>${seconds(tick)}</span>`)}</span>
      <span class="n" role="columnheader">took</span></div>
    ${parts.map((part, n) => html`<div class=${classes("wf-row", part.failed && "failed")} role="row" key=${n}>
      <span role="cell" class="wf-name" title=${PARTS[part.name]?.[1]}><i class="swatch-box part-${part.name}" aria-hidden="true"></i>${PARTS[part.name]?.[0] ?? part.name}${part.failed && html` <b class="fail">failed</b>`}</span>
      <span role="cell" class="wf-engine" title=${part.engine}>${part.engine ?? ""}</span>
      <span role="cell" class="wf-track" aria-label=${`from ${seconds(part.start_s)} to ${seconds(part.end_s)}`}>
        ${known(request.ttft_s) && html`<i class="wf-first" style=${{ left: at(Math.min(request.ttft_s, end)) }}></i>`}
        <i class="wf-bar part-${part.name}" style=${{ left: at(part.start_s), width: at(Math.max(0, part.end_s - part.start_s)) }}></i></span>
      <span role="cell" class="n">${known(part.end_s) && known(part.start_s) ? seconds(part.end_s - part.start_s) : NONE}</span>
      ${part.note && html`<span role="cell" class="wf-note">${part.note}</span>`}
    </div>`)}
    ${known(request.ttft_s) && html`<p class="note">The line through the bars is the first token, at ${seconds(request.ttft_s)}.</p>`}
  </div>`;
}

// ----------------------------------------------------------------------------------------------------------- explain

function Explain({ explain, message }) {
  if (!explain) return html`<${Panel} title="Why"><${Message} level="info">${message ?? "The router holds no decision about this request."}<//><//>`;
  return html`
    ${explain.decisions.map((decision, n) => html`<${Decision} key=${n} decision=${decision} n=${n + 1} of=${explain.decisions.length} />`)}
    ${explain.transfers?.length > 0 && html`<${Panel} title="KV moved"><${Table} label="KV moved" columns=${[
      { name: "attempt", title: "Attempt" }, { name: "bytes", title: "Size", number: true }, { name: "took", title: "Took", number: true },
      { name: "held", title: "Held back", number: true }, { name: "descriptors", title: "Descriptors", number: true }]}
      rows=${explain.transfers.map((one) => ({ attempt: html`<span class="mono">${one.attempt_id}</span>`, bytes: bytes(one.n_bytes), took: seconds(one.seconds), held: seconds(one.held_s), descriptors: count(one.descriptors) }))} /><//>`}
    ${explain.flows?.length > 0 && html`<${Panel} title="KV flows"><${Table} label="KV flows" columns=${[
      { name: "path", title: "From and to" }, { name: "level", title: "Level", number: true }, { name: "mlu", title: "MLU", number: true }, { name: "size", title: "Size", number: true },
      { name: "held", title: "Held back", number: true }, { name: "moved", title: "Moved in", number: true }]}
      rows=${explain.flows.map((one) => ({ path: `${one.source} → ${one.target}`, level: one.first_level === one.last_level ? one.first_level : `${one.first_level}, then ${one.last_level}`,
        mlu: number(one.mlu), size: bytes(one.size), held: seconds(one.held_s), moved: seconds(one.moved_s) }))} /><//>`}`;
}

function Decision({ decision, n, of }) {
  const [all, setAll] = useState(false);
  useEffect(() => setAll(false), [decision.at_s]);
  const title = `Why: decision ${n} of ${of}`;
  const held = Object.entries(decision.quarantined ?? {});
  const quarantined = held.length > 0 && html`<p class="note">In quarantine then: ${held.map(([worker, reason]) => `${worker} (${words(reason)})`).join(", ")}.</p>`;
  if (!decision.decision) {
    return html`<${Panel} title=${title} note=${clock(decision.at_s, 3)}><${Message} level="error">Rejected with ${decision.status}: ${decision.reason}${known(decision.retry_after_s) ? `, try again in ${seconds(decision.retry_after_s)}` : ""}<//>${quarantined}<//>`;
  }
  const { worker, reason, ranking } = decision.decision, policy = decision.policy;
  const terms = termsOf(ranking);
  const shown = all ? ranking : ranking.slice(0, MOST_RANKED);
  const waits = [known(decision.waited_s) && `waited ${seconds(decision.waited_s)}`, known(decision.kv_due_s) && `KV due in ${seconds(decision.kv_due_s)}`].filter(Boolean);
  const columns = [{ name: "worker", title: "Worker" }, { name: "cost", title: "cost", number: true }, ...terms.map((term) => ({ name: `t ${term}`, title: term, number: true }))];
  return html`<${Panel} title=${title} note=${clock(decision.at_s, 3)} name="decision">
    <p class="decided"><b>${stageOf(decision)}</b> → <b class="mono">${worker}</b> <span class="note">${[words(reason), ...waits].join(", ")}</span></p>
    ${quarantined}
    ${policy && html`<dl class="formula"><div><dt>policy</dt><dd>${policy.name}${Object.keys(policy.params ?? {}).length > 0 && html` <span class="note">${Object.entries(policy.params).map(([k, v]) => `${k} = ${short(v, 24)}`).join(", ")}</span>`}</dd></div>
      <div><dt>formula</dt><dd class="mono">${policy.formula}</dd></div>
      ${valued(decision.decision, policy).slice(0, WITH_NUMBERS).map((one) => html`<div key=${one.worker}><dt class=${one.worker === worker && "chosen"}>${one.worker}</dt><dd class="mono">${withNumbers(one, policy)}</dd></div>`)}</dl>`}
    ${ranking.length > 0 && html`<${Table} label=${`Ranking of decision ${n}`} columns=${columns} rows=${shown.map((one) => ({
      key: one.worker, class: one.worker === worker && "picked", worker: html`<span class="mono">${one.worker === worker ? "▸ " : ""}${one.worker}</span>`, cost: six(one.cost),
      ...Object.fromEntries(terms.map((term) => [`t ${term}`, six(one.terms?.[term])])) }))} />`}
    ${ranking.length > MOST_RANKED && html`<button type="button" class="link" onClick=${() => setAll(!all)}>${all ? "Show fewer" : `Show all ${ranking.length} candidates`}</button>`}
  <//>`;
}
