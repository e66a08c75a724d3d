// What if: the running cluster in the simulator, with changes, side by side; and whether the simulation is to be trusted.

import { html, useEffect, useState } from "../lib.js";
import { get, post } from "../api.js";
import { loose } from "../forms.js";
import { figure, figureName } from "./experiments.js";
import { Editor, Empty, Message, Panel, Read, Table, WatchOnly, only, useChange, useRead } from "../ui.js";
import { percent, short, words } from "../format.js";

const draft = { base: null, text: null, changes: [{ name: "", set: "" }] }; // what was typed outlives a look at another view

export function WhatIf({ role }) {
  const may = role === "admin";
  const [turn, setTurn] = useState(0);
  const base = useRead(() => may && (draft.base ??= post("/api/whatif/base").catch((error) => { draft.base = null; throw error; })), turn);
  const state = useRead(() => get("/api/whatif"), "whatif", 1500);
  const [text, setText] = useState(draft.text);
  const [changes, setChanges] = useState(draft.changes);
  const [problem, setProblem] = useState(null);
  const [busy, error, run] = useChange();
  useEffect(() => {
    if (text === null && base.value) setText(base.value.text);
  }, [base.value]);
  useEffect(() => {
    draft.text = text;
    draft.changes = changes;
  }, [text, changes]);
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
    if (await run(() => post("/api/whatif/start", { text, changes: asked, base: base.value.base }))) state.again();
  };
  return html`<${WatchOnly} role=${role} />
    <div class="two">
      <${Panel} title="Base" unit="YAML, made from what runs" actions=${html`<button type="button" ...${only(may)} onClick=${() => { draft.base = null; setText(null); setTurn(turn + 1); }}>Read anew</button>`}>
        <${Read} read=${base} what="Writing the file from what runs">${(value) => value && html`
          ${base.error && html`<${Message} level="error">${base.error.message}<//>`}
          ${value.problems?.length > 0 && html`<${Message} level="warn"><ul>${value.problems.map((one, n) => html`<li key=${n}>${one}</li>`)}</ul><//>`}
          <dl class="pairs">${Object.entries(value.facts ?? {}).map(([name, fact]) => html`<div key=${name}><dt>${words(name)}</dt><dd>${short(fact, 80)}</dd></div>`)}</dl>
          <${Editor} value=${text ?? value.text} onInput=${setText} label="Base file" rows=${22} />`}<//>
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
              : html`<button type="button" class="primary" ...${only(may, busy || text === null)} onClick=${start}>Simulate</button>`}
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
