// What if: the running cluster in the simulator, with changes, side by side; and whether the simulation is to be trusted.

import { html, useEffect, useState } from "../lib.js";
import { get, post } from "../api.js";
import { loose } from "../forms.js";
import { Off, figure, figureName } from "./experiments.js";
import { Editor, Empty, Message, Panel, Read, Table, WatchOnly, only, useChange, useRead } from "../ui.js";
import { percent, short, words } from "../format.js";

// What was read and typed outlives a look at another view: the base, its file as it was edited, and the changes.
const draft = { value: null, read_ms: null, text: null, reading: null, changes: [{ name: "", set: "" }] };

// The base with its file. Its answer takes the place of both, so nothing can be typed meanwhile; without one both stay.
function useBase(may) {
  const now = (error = null) => ({ value: draft.value, read_ms: draft.read_ms, error, loading: false });
  const [state, set] = useState(now);
  const [text, setText] = useState(draft.text);
  const edit = (typed) => {
    draft.text = typed;
    setText(typed);
  };
  const read = async () => {
    set({ ...now(), loading: true });
    draft.reading ??= post("/api/whatif/base")
      .then((value) => Object.assign(draft, { value, read_ms: performance.now(), text: value.text }))
      .finally(() => { draft.reading = null; });
    const error = await draft.reading.then(() => null, (failed) => failed);
    set(now(error));
    setText(draft.text);
  };
  useEffect(() => {
    if (may && (draft.value === null || draft.reading)) read();
  }, []);
  return { ...state, text, edit, read };
}

export const WhatIf = ({ role, experiments }) => (experiments ? html`<${Question} may=${role === "admin"} role=${role} />` : html`<${Off} what="What-if questions" />`);

function Question({ may, role }) {
  const base = useBase(may);
  const state = useRead(() => get("/api/whatif"), "whatif", 1500);
  const [changes, setChanges] = useState(draft.changes);
  const [problem, setProblem] = useState(null);
  const [busy, error, run] = useChange();
  useEffect(() => {
    draft.changes = changes;
  }, [changes]);
  const edit = (n, part) => setChanges(changes.map((change, at) => (at === n ? { ...change, ...part } : change)));
  const running = state.value?.state === "running";
  const start = async () => {
    let asked;
    try {
      asked = readChanges(changes);
    } catch (wrong) {
      setProblem(wrong.message);
      return;
    }
    setProblem(null);
    if (await run(() => post("/api/whatif/start", { text: base.text, changes: asked, base: base.value.base }))) state.again();
  };
  return html`<${WatchOnly} role=${role} />
    <div class="two">
      <${Panel} title="Base" unit="YAML, made from what runs" actions=${html`<button type="button" ...${only(may, base.loading)} onClick=${base.read}>Read anew</button>`}>
        ${may && html`<${Read} read=${base} what="Writing the file from what runs">${(value) => html`
          ${base.loading && html`<${Empty}>Writing the file from what runs now…<//>`}
          ${value.problems?.length > 0 && html`<${Message} level="warn"><ul>${value.problems.map((one, n) => html`<li key=${n}>${one}</li>`)}</ul><//>`}
          <dl class="pairs">${Object.entries(value.facts ?? {}).map(([name, fact]) => html`<div key=${name}><dt>${words(name)}</dt><dd>${short(fact, 80)}</dd></div>`)}</dl>
          <${Editor} value=${base.text} onInput=${base.edit} readOnly=${base.loading} label="Base file" rows=${22} />`}<//>`}
      <//>
      <div class="stack">
        <${Panel} title="Changes" note="each is one column beside the base">
          ${changes.map((change, n) => html`<fieldset key=${n} class="change-box"><legend>Change ${n + 1}</legend>
            <label class="field">Name <input value=${change.name} placeholder="one prefill engine more" disabled=${!may} onInput=${(e) => edit(n, { name: e.target.value })} /></label>
            <label class="field">Set <textarea class="mono" rows="3" value=${change.set} placeholder="cluster.engines.prefill.count = 3" disabled=${!may} spellcheck=${false} onInput=${(e) => edit(n, { set: e.target.value })}></textarea></label>
            <button type="button" class="link" disabled=${changes.length === 1} onClick=${() => setChanges(changes.filter((_, at) => at !== n))}>Remove</button></fieldset>`)}
          ${(problem || error) && html`<${Message} level="error">${problem ?? error}<//>`}
          <div class="buttons">
            <button type="button" disabled=${!may} onClick=${() => setChanges([...changes, { name: "", set: "" }])}>Add a change</button>
            ${running ? html`<button type="button" class="danger" ...${only(may)} onClick=${() => run(() => post("/api/whatif/stop"))}>Stop</button>`
              : html`<button type="button" class="primary" ...${only(may, busy || base.loading || base.text === null)} onClick=${start}>Simulate</button>`}
          </div>
        <//>
        <${Read} read=${state} what="Asking for the simulation">${(value) => html`<${Outcome} value=${value} />`}<//>
      </div>
    </div>`;
}

// The changes as the server takes them: lines KEY = VALUE. Throws an Error for a line that is none.
export function readChanges(changes) {
  const used = changes.filter((change) => change.name.trim() || change.set.trim());
  return used.map((change, n) => {
    const set = {};
    for (const line of change.set.split("\n").map((one) => one.trim()).filter(Boolean)) {
      const at = line.indexOf("=");
      if (at < 1) throw new Error(`Change ${n + 1}: ${short(line, 60)} must look like KEY = VALUE, such as workload.rate_per_s = 12.`);
      set[line.slice(0, at).trim()] = loose(line.slice(at + 1));
    }
    if (!Object.keys(set).length) throw new Error(`Change ${n + 1} (${change.name}) sets nothing: write KEY = VALUE.`);
    return { name: change.name.trim() || `change ${n + 1}`, set };
  });
}

function Outcome({ value }) {
  const { state, progress, phase, message, result } = value;
  return html`<${Panel} title="Side by side" note=${state === "running" ? phase : undefined}>
    ${state === "running" && html`<div class="progress-line"><progress max="1" value=${progress ?? 0} aria-label="progress"></progress><span>${percent(progress, 0)}</span></div>`}
    ${message && html`<${Message} level=${state === "failed" ? "error" : "info"}>${message}<//>`}
    ${!result && state === "idle" && html`<${Empty}>Nothing has been simulated yet. The first column will be the base; what was measured stands beside it.<//>`}
    ${result && html`<${Message} level=${result.trust.ok ? "ok" : "warn"}>${result.trust.text}<//><${Columns} result=${result} trusted=${result.trust.ok} />`}
  <//>`;
}

function Columns({ result, trusted }) {
  const names = [...new Set([...Object.keys(result.measured ?? {}), ...result.columns.flatMap((column) => Object.keys(column.figures))])];
  return html`<div class=${trusted ? "" : "distrusted"}><${Table} label="Figures side by side" columns=${[{ name: "figure", title: "Figure" }, { name: "measured", title: "Measured", number: true },
    ...result.columns.map((column, n) => ({ name: `c${n}`, title: column.name, number: true }))]}
    rows=${names.map((name) => ({ key: name, figure: figureName(name), measured: figure(name, result.measured?.[name]),
      ...Object.fromEntries(result.columns.map((column, n) => [`c${n}`, figure(name, column.figures[name])])) }))} /></div>`;
}
