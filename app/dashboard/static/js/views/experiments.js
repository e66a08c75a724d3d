// Experiments: a load and a timeline of actions from one YAML file, watched while they run, and compared afterwards.

import { html, useRef, useState } from "../lib.js";
import { get, post, remove } from "../api.js";
import { RunChart, colourOf } from "../chart.js";
import { Absent, BeforeAfter, Dialog, Editor, Empty, Message, Panel, Read, State, Table, Tabs, WatchOnly, only, useChange, useRead } from "../ui.js";
import { NONE, bytes, count, dateClock, known, number, percent, rate, seconds, short, words } from "../format.js";

const PARTS = [["new", "New"], ["runs", "Runs"], ["compare", "Compare"]];
const MOST_COMPARED = 4;

// The charts of a run: title, unit, format, how the names of its samples begin, and whether only whole numbers are marked.
const CHARTS = [
  ["Time to first token, p95", "s", seconds, "ttft_p95_s/"], ["Time per output token, p95", "s", seconds, "tpot_p95_s/"],
  ["SLO attainment", "share of requests", (v) => percent(v, 0), "attainment/"], ["Requests ended", "1/s", rate, "requests_per_s"],
  ["Output tokens", "1/s", rate, "tokens_per_s"], ["Queue", "requests", count, "queued", true], ["Pool", "requests", count, "pool", true],
  ["KV in use", "share of blocks", (v) => percent(v, 0), "kv_usage"], ["Active engines", "engines", count, "engines_active", true],
];

const fits = (name, begin) => (begin.endsWith("/") ? name.startsWith(begin) : name === begin);

// Says that there is no ingress to which the dashboard could send a load, or of which it could ask what runs.
export const Off = ({ what }) => html`<${Absent} what=${`${what} are off here.`} why="The ingress has no port of its own (ingress.port is 0), and dashboard.experiments.url names no other one." />`;

export const Experiments = (props) => (props.experiments ? html`<${Parts} ...${props} />` : html`<${Off} what="Experiments" />`);

function Parts({ role, rest, go }) {
  const part = PARTS.some(([id]) => id === rest.split("/")[0]) ? rest.split("/")[0] : "new";
  const id = rest.split("/").slice(1).join("/");
  const read = useRead(() => get("/api/experiments"), "experiments", 3000);
  const may = role === "admin";
  return html`<div class="view-head"><${Tabs} tabs=${PARTS} at=${part} onChange=${(next) => go("experiments", next)} label="Experiments" />
      ${read.value?.running && html`<span class="note">running: <a href=${`#/experiments/runs/${encodeURIComponent(read.value.running.id)}`}>${read.value.running.name}</a>, ${percent(read.value.running.progress, 0)}</span>`}
    </div>
    <${WatchOnly} role=${role} />
    <${Read} read=${read} what="Reading the list">${(list) => part === "new"
      ? html`<${New} list=${list} may=${may} go=${go} again=${read.again} />`
      : part === "runs"
        ? html`<${Runs} list=${list} id=${id} may=${may} go=${go} again=${read.again} />`
        : html`<${Compare} list=${list} ids=${id ? id.split(",") : []} go=${go} />`}<//>`;
}

// -------------------------------------------------------------------------------------------------------------- new

function New({ list, may, go, again }) {
  const kept = useRef(null);
  const [text, setText] = useState(() => draft.text ?? list.shipped[0]?.text ?? "");
  const [checked, setChecked] = useState(null);
  const [asking, setAsking] = useState(false);
  const [busy, error, run] = useChange();
  const edit = (value) => {
    draft.text = value;
    setText(value);
    setChecked(null);
  };
  const check = async () => {
    const answer = await run(() => post("/api/experiments/check", { text }));
    if (answer) setChecked(answer);
    return answer;
  };
  const begin = async () => {
    const answer = await check();
    if (answer?.ok) setAsking(true);
  };
  const start = async () => {
    const answer = await run(() => post("/api/experiments/start", { text }));
    if (answer) {
      setAsking(false);
      again();
      go("experiments", `runs/${answer.id}`);
    }
  };
  const limits = list.bounds ?? {};
  return html`<div class="two" ref=${kept}>
    <${Panel} title="Experiment file" unit="YAML" actions=${html`<label class="inline">Begin with <select onChange=${(e) => { const one = list.shipped.find((s) => s.name === e.target.value); if (one) edit(one.text); }}>
        <option value="">a shipped experiment…</option>${list.shipped.map((one) => html`<option key=${one.name} value=${one.name}>${one.name}</option>`)}</select></label>`}>
      <${Editor} value=${text} onInput=${edit} label="Experiment file" rows=${26} />
      ${error && !asking && html`<${Message} level="error">${error}<//>`}
      <div class="buttons">
        <button type="button" ...${only(may, busy)} onClick=${check}>Check</button>
        <button type="button" class="primary" ...${only(may, busy || list.running, list.running ? "One experiment runs already" : undefined)} onClick=${begin}>Start…</button>
      </div>
    <//>
    <div class="stack">
      <${Panel} title="What it would do">${checked === null
        ? html`<${Empty}>Check the file to see its phases and actions on a time line.<//>`
        : html`${checked.problems.length > 0 && html`<${Message} level="error"><ul>${checked.problems.map((problem, n) => html`<li key=${n}>${problem}</li>`)}</ul><//>`}
            ${checked.ok && html`<${Message} level="ok">The file is in order.<//>`}${checked.plan && html`<${PlanView} plan=${checked.plan} />`}`}<//>
      <${Panel} title="Bounds" note="set in the server's configuration"><dl class="pairs">
        <div><dt>rate</dt><dd>${known(limits.rate_per_s) ? `up to ${rate(limits.rate_per_s)} requests/s` : NONE}</dd></div>
        <div><dt>duration</dt><dd>${known(limits.duration_s) ? `up to ${seconds(limits.duration_s)}` : NONE}</dd></div>
        <div><dt>disk</dt><dd>${known(limits.disk_bytes) ? `up to ${bytes(limits.disk_bytes)}` : NONE}</dd></div>
        <div><dt>killing an engine</dt><dd>${limits.may_kill ? "allowed" : "not allowed"}</dd></div>
        <div><dt>folder</dt><dd class="mono break">${list.folder ?? NONE}</dd></div></dl><//>
      <${Panel} title="Shipped"><ul class="shipped">${list.shipped.map((one) => html`<li key=${one.name}><button type="button" class="link" onClick=${() => edit(one.text)}>${one.name}</button><span class="note">${one.summary}</span></li>`)}</ul><//>
    </div>
    ${asking && checked?.plan && html`<${Dialog} title="Start the experiment" confirm="Start" busy=${busy} error=${error} onConfirm=${start} onClose=${() => setAsking(false)}>
      <p>It sends ${count(checked.plan.requests)} requests in ${seconds(checked.plan.duration_s)}. Whatever ends it, policies and numbers are put back.</p>
      ${checked.plan.actions.length > 0 && html`<${BeforeAfter} changes=${checked.plan.actions.slice(0, 8).map((action) => [`after ${seconds(action.at_s)}`, "as it is", action.what])} />`}
    <//>`}
  </div>`;
}

const draft = { text: null }; // what was typed outlives a look at another view

// The load by phase and the actions on one time line.
function PlanView({ plan }) {
  const most = Math.max(...plan.phases.map((phase) => phase.rate_per_s ?? 0), 0.001), end = plan.duration_s || 1;
  const x = (s) => (100 * s) / end;
  return html`<div class="plan-view">
    <p class="note">${count(plan.requests)} requests in ${seconds(plan.duration_s)}, at most ${number(most)} a second.</p>
    <div class="plan-line" role="img" aria-label=${`Load: ${plan.phases.map((p) => `${p.name} from ${seconds(p.from_s)} at ${rate(p.rate_per_s)} requests/s`).join(", ")}`}>
      ${plan.phases.map((phase, n) => html`<div key=${n} class="phase" title=${`${phase.name}: ${rate(phase.rate_per_s)} requests/s from ${seconds(phase.from_s)} to ${seconds(phase.to_s)}`}
        style=${{ left: `${x(phase.from_s)}%`, width: `${x(phase.to_s - phase.from_s)}%`, height: `${Math.max(2, (100 * (phase.rate_per_s ?? 0)) / most)}%` }}></div>`)}
      ${plan.actions.map((action, n) => html`<i key=${`a${n}`} class="action-mark" style=${{ left: `${x(action.at_s)}%` }} title=${action.what}></i>`)}
    </div>
    <div class="plan-scale"><span>0 s</span><span>${seconds(end / 2)}</span><span>${seconds(end)}</span></div>
    <${Table} label="Phases" columns=${[{ name: "name", title: "Phase" }, { name: "from", title: "From", number: true }, { name: "to", title: "To", number: true }, { name: "rate", title: "Rate", unit: "1/s", number: true }]}
      rows=${plan.phases.map((phase, n) => ({ key: n, name: phase.name, from: seconds(phase.from_s), to: seconds(phase.to_s), rate: number(phase.rate_per_s) }))} />
    ${plan.actions.length > 0 && html`<${Table} label="Actions" columns=${[{ name: "at", title: "At" }, { name: "what", title: "Action" }]}
      rows=${plan.actions.map((action, n) => ({ key: n, at: seconds(action.at_s), what: action.what }))} />`}
  </div>`;
}

// ------------------------------------------------------------------------------------------------------------- runs

function Runs({ list, id, may, go, again }) {
  const [chosen, setChosen] = useState([]);
  const [ask, setAsk] = useState(null);
  const [busy, error, run] = useChange();
  const toggle = (one) => setChosen(chosen.includes(one) ? chosen.filter((c) => c !== one) : [...chosen, one].slice(-MOST_COMPARED));
  const erase = async () => {
    const answer = await run(() => remove(`/api/experiments/runs/${encodeURIComponent(ask.id)}`));
    if (answer) {
      setAsk(null);
      again();
      if (ask.id === id) go("experiments", "runs");
    }
  };
  return html`<div class="runs">
    <${Panel} title="Runs" name="run-list" actions=${html`<button type="button" disabled=${chosen.length < 2} onClick=${() => go("experiments", `compare/${chosen.join(",")}`)}>Compare ${chosen.length > 1 ? chosen.length : ""}</button>`}>
      ${list.runs.length === 0 ? html`<${Empty}>Nothing has been run yet.<//>` : html`<ul class="run-rows">${list.runs.map((one) => html`<li key=${one.id} class=${one.id === id && "picked"}>
        <input type="checkbox" aria-label=${`compare ${one.name} of ${dateClock(one.began_at)}`} checked=${chosen.includes(one.id)} disabled=${one.state === "running"} onChange=${() => toggle(one.id)} />
        <a href=${`#/experiments/runs/${encodeURIComponent(one.id)}`} aria-current=${one.id === id ? "true" : undefined}><b>${one.name}</b><span class="note">${dateClock(one.began_at)}, ${seconds(one.took_s)}</span></a>
        <${State} state=${one.state} /></li>`)}</ul>`}
    <//>
    <div>${id ? html`<${OneRun} key=${id} id=${id} now=${list.runs.find((one) => one.id === id)} may=${may} go=${go} again=${again} onDelete=${setAsk} />` : html`<${Panel} title="One run"><${Empty}>Choose a run to see it, or two to four to compare them.<//><//>`}</div>
    ${ask && html`<${Dialog} title="Delete a run" confirm="Delete" danger=${true} busy=${busy} error=${error} onConfirm=${erase} onClose=${() => setAsk(null)}>
      <p>${ask.name} of ${dateClock(ask.began_at)}, with all its samples. This cannot be undone.</p><//>`}
  </div>`;
}

// While a run is under way its state is that of the list, `now`: each reading of its samples takes from what is measured.
function OneRun({ id, now, may, go, again, onDelete }) {
  const live = now?.state === "running";
  const read = useRead(() => get(`/api/experiments/runs/${encodeURIComponent(id)}`), `${id} ${live}`, live ? 10000 : 0);
  const [busy, error, run] = useChange();
  const report = (kind) => `/api/experiments/runs/${encodeURIComponent(id)}/report.${kind}`;
  return html`<${Read} read=${read} what="Reading the run">${(got) => { const value = { ...got, run: now ?? got.run }; return html`
    <${Panel} title=${value.run.name} note=${dateClock(value.run.began_at)} actions=${live
      ? html`<button type="button" class="danger" ...${only(may, busy)} onClick=${() => run(() => post("/api/experiments/stop")).then(again)}>Stop</button>`
      : html`<button type="button" onClick=${() => { draft.text = value.text; go("experiments", "new"); }}>Run again…</button>
          <a class="button" href=${report("html")} download>Report</a><a class="button" href=${report("json")} download>JSON</a><a class="button" href=${report("png")} download>PNG</a>
          <button type="button" class="danger" ...${only(may)} onClick=${() => onDelete(value.run)}>Delete</button>`}>
      <div class="progress-line"><${State} state=${value.run.state} /><progress max="1" value=${value.run.progress ?? 0} aria-label="progress"></progress><span>${percent(value.run.progress, 0)}</span>
        <span class="note">${value.run.phase ?? ""}${known(value.run.took_s) ? `, ${seconds(value.run.took_s)}` : ""}</span></div>
      ${value.run.message && html`<${Message} level=${value.run.state === "failed" ? "error" : "info"}>${value.run.message}<//>`}
      ${error && html`<${Message} level="error">${error}<//>`}
      ${value.run.summary && html`<div class="figures">${Object.entries(value.run.summary).filter(([, v]) => v === null || typeof v !== "object").map(([name, v]) => html`<div class="figure" key=${name}><span class="name">${figureName(name)}</span><span class="value">${figure(name, v)}</span></div>`)}</div>`}
    <//>
    <${RunCharts} samples=${[{ label: null, samples: value.samples, colour: null }]} actions=${value.actions ?? []} />
    <details class="panel file"><summary>File and versions</summary><pre class="text">${value.text}</pre><pre class="text">${JSON.stringify(value.versions, null, 2)}</pre></details>`; }}<//>`;
}

// The charts of one run (a line for each class) or of several (a line for each run, and a dash for each class).
function RunCharts({ samples, actions }) {
  const several = samples.length > 1;
  const charts = CHARTS.map(([title, unit, format, begin, whole]) => {
    const runs = [];
    const suffixes = [...new Set(samples.flatMap((one) => Object.keys(one.samples ?? {}).filter((name) => fits(name, begin))))].sort();
    samples.forEach((one, n) => suffixes.forEach((name, m) => {
      if (!one.samples?.[name]) return;
      const suffix = begin.endsWith("/") ? name.slice(begin.length) : "";
      const label = several ? [one.label, suffix].filter(Boolean).join(", ") : suffix || title.toLowerCase();
      runs.push({ label, colour: colourOf(several ? n : m), dash: several && m > 0 ? [4, 3] : undefined, t: one.samples.t, values: one.samples[name] });
    }));
    return runs.length > 0 && html`<${RunChart} key=${begin} title=${title} unit=${unit} format=${format} whole=${whole} runs=${runs} actions=${actions} />`;
  }).filter(Boolean);
  return charts.length ? html`<div class="charts">${charts}</div>` : html`<${Panel} title="Samples"><${Empty}>There are no samples yet.<//><//>`;
}

const UNITS = { s: seconds, share: percent, "": number };
const ACRONYMS = /\b(ttft|tpot|kv|slo|e2e)\b/g;

// The name of a figure for people; its unit stands with its values.
export const figureName = (name) => words(name.replace(/_per_s$/, "_per_second").replace(/_(s|bytes)$/, "")).replace(ACRONYMS, (one) => one.toUpperCase());

export function figure(name, value, unit) {
  if (value === null || value === undefined) return NONE;
  if (typeof value !== "number") return short(value, 40);
  if (unit !== undefined && unit !== null) return UNITS[unit] ? UNITS[unit](value) : `${number(value)} ${unit.replace(/^1\//, "/")}`;
  if (name.endsWith("_per_s")) return `${number(value)} /s`;
  if (name.endsWith("_s")) return seconds(value);
  if (/attainment|share|usage/.test(name)) return percent(value);
  return number(value);
}

// ---------------------------------------------------------------------------------------------------------- compare

function Compare({ list, ids, go }) {
  const done = list.runs.filter((one) => one.state !== "running");
  const choose = (id) => {
    const next = ids.includes(id) ? ids.filter((one) => one !== id) : [...ids, id].slice(-MOST_COMPARED);
    go("experiments", `compare/${next.join(",")}`);
  };
  return html`<div class="runs">
    <${Panel} title="Runs to compare" name="run-list">${done.length === 0 ? html`<${Empty}>Nothing has been run yet.<//>` : html`<ul class="run-rows">${done.map((one) => html`<li key=${one.id}>
      <input type="checkbox" id=${`c ${one.id}`} checked=${ids.includes(one.id)} onChange=${() => choose(one.id)} />
      <label for=${`c ${one.id}`}><b>${one.name}</b><span class="note">${dateClock(one.began_at)}, ${seconds(one.took_s)}</span></label>
      <${State} state=${one.state} /></li>`)}</ul>`}<//>
    <div>${ids.length < 2 ? html`<${Panel} title="Comparison"><${Empty}>Choose two to ${MOST_COMPARED} runs.<//><//>` : html`<${Comparison} key=${ids.join()} ids=${ids} />`}</div>
  </div>`;
}

function Comparison({ ids }) {
  const read = useRead(() => get(`/api/experiments/compare?ids=${ids.map(encodeURIComponent).join()}`), ids.join());
  return html`<${Read} read=${read} what="Comparing">${(value) => {
    const name = (id) => {
      const run = value.runs.find((one) => one.id === id);
      const twice = value.runs.filter((one) => one.name === run?.name).length > 1;
      return run ? (twice ? `${run.name}, ${dateClock(run.began_at).slice(11)}` : run.name) : id;
    };
    const columns = value.columns ?? ids.map(name);
    // a run has a column for each of its arms, and the charts a colour for each column
    const coloured = (title, n) => (columns.length > 1 ? html`<span class="dot" style=${{ background: `var(${colourOf(n)})` }}></span> ${title}` : title);
    const others = columns.slice(1);
    const differencesOf = (row) => row.differences ?? [null, { difference: row.difference, interval: row.interval }];
    return html`<${Panel} title="Figures" note="differences are against the first column; bold where the 95 % interval leaves out zero">
      <${Table} label="Figures of the runs" columns=${[{ name: "figure", title: "Figure" }, ...columns.map((title, n) => ({ name: `v${n}`, title: coloured(title, n), number: true })),
        ...others.map((title, n) => ({ name: `d${n + 1}`, title: others.length > 1 ? `difference of ${title}` : "Difference", number: true })), { name: "basis", title: "Interval by" }]}
        rows=${value.table.map((row) => ({
          key: row.figure, figure: html`${figureName(row.figure)}`, basis: row.basis ? html`<span class="note">${row.basis}</span>` : NONE,
          ...Object.fromEntries(row.values.map((v, n) => [`v${n}`, figure(row.figure, v, row.unit)])),
          ...Object.fromEntries(others.map((_, n) => [`d${n + 1}`, html`<${Difference} row=${row} one=${differencesOf(row).length === others.length ? differencesOf(row)[n] : differencesOf(row)[n + 1]} />`])),
        }))} /><//>
      <${RunCharts} samples=${(value.keys ?? ids).map((key, n) => ({ label: value.keys ? columns[n] : name(key), samples: value.samples[key] }))} actions=${[]} />`;
  }}<//>`;
}

function Difference({ row, one }) {
  if (!one || !known(one.difference)) return NONE;
  const sign = one.difference > 0 ? "+" : one.difference < 0 ? "−" : "±";
  const text = `${sign}${figure(row.figure, Math.abs(one.difference), row.unit)}`;
  const clear = one.interval && (one.interval[0] > 0 || one.interval[1] < 0);
  return html`<span class=${clear ? "clear" : ""}>${text}</span>${one.interval
    ? html`<span class="interval">${signed(row, one.interval[0])} to ${signed(row, one.interval[1])}</span>` : html`<span class="interval">no interval</span>`}`;
}

const signed = (row, value) => `${value < 0 ? "−" : "+"}${figure(row.figure, Math.abs(value), row.unit)}`;
