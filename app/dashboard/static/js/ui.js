// The small parts that all views are made of.

import { html, useEffect, useRef, useState } from "./lib.js";
import { NONE, seconds } from "./format.js";

export const classes = (...names) => names.filter(Boolean).join(" ");

export function Panel({ title, unit, note, actions, children, name, wide }) {
  return html`<section class=${classes("panel", name, wide && "wide")} aria-label=${title}>
    ${title && html`<header class="panel-head">
      <h2>${title}${unit && html` <span class="unit">${unit}</span>`}</h2>
      ${note && html`<span class="note">${note}</span>`}
      <span class="grow"></span>
      ${actions}
    </header>`}
    ${children}
  </section>`;
}

// Says that a part does not exist, and why.
export const Absent = ({ what, why }) => html`<div class="absent">
  <p><strong>${what}</strong></p><p>${why}</p>
</div>`;

export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;

// A message with its weight: "error", "warn", "ok" or "info". A sign stands beside the colour.
const SIGNS = { error: "✕", warn: "!", ok: "✓", info: "i" };
export const Message = ({ level = "info", children, role }) => html`<div class="message ${level}" role=${role ?? (level === "error" ? "alert" : "status")}>
  <span class="sign" aria-hidden="true">${SIGNS[level]}</span><div>${children}</div>
</div>`;

const STATE_LEVELS = {
  ready: "ok", active: "ok", met: "ok", done: "ok", warm: "cool", starting: "cool", running: "cool", draining: "warn",
  stalled: "warn", quarantined: "warn", stopped: "warn", down: "error", failed: "error", rejected: "error", expired: "error", "TTFT missed": "error", "TPOT missed": "error",
};
const STATE_SIGNS = { ok: "●", cool: "◐", warn: "▲", error: "✕", none: "○" };
export function State({ state }) {
  const level = STATE_LEVELS[state] ?? "none";
  return html`<span class="state ${level}"><span aria-hidden="true">${STATE_SIGNS[level]}</span> ${state ?? NONE}</span>`;
}

export const ROLES = { prefill: "P", decode: "D", colocated: "C" };
export const Role = ({ role, home }) => html`<span class="role role-${role}" title=${home && home !== role ? `its home role is ${home}` : role}>
  <b aria-hidden="true">${ROLES[role] ?? "?"}</b> ${role}${home && home !== role && html`<span class="note"> (home: ${home})</span>`}
</span>`;

// A bar for a share of 0..1 with its text; an unknown share has no bar at all.
export function Bar({ share, text, kind, label }) {
  const known = typeof share === "number";
  const width = known ? Math.max(0, Math.min(1, share)) * 100 : 0;
  return html`<span class=${classes("bar", kind)} title=${label}>
    <span class="bar-track" aria-hidden="true">${known && html`<span class="bar-fill" style=${{ width: `${width}%` }}></span>`}</span>
    <span class="bar-text">${text}</span>
  </span>`;
}

// Tabs by arrow keys, Home and End, as the ARIA practices have them. `tabs` is a list of [id, title].
export function Tabs({ tabs, at, onChange, label, className, panel }) {
  const list = useRef(null);
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const index = tabs.findIndex(([id]) => id === at);
    let next;
    if (step) next = (index + step + tabs.length) % tabs.length;
    else if (event.key === "Home") next = 0;
    else if (event.key === "End") next = tabs.length - 1;
    else return;
    event.preventDefault();
    onChange(tabs[next][0]);
    list.current.querySelectorAll('[role="tab"]')[next].focus();
  };
  return html`<div role="tablist" aria-label=${label} class=${className ?? "segments"} ref=${list} onKeyDown=${move}>
    ${tabs.map(([id, title]) => html`<button type="button" role="tab" key=${id} id=${`tab-${id}`} aria-selected=${String(id === at)}
      aria-controls=${panel} tabindex=${id === at ? 0 : -1} onClick=${() => onChange(id)}>${title}</button>`)}
  </div>`;
}

// A table. `columns` is a list of {name, title, number, width}; a row has its cells by name, and may have `key`, `class`, `onClick`.
export function Table({ columns, rows, label, empty, caption }) {
  if (!rows.length && empty) return html`<${Empty}>${empty}<//>`;
  return html`<div class="table-box" tabindex="0" role="group" aria-label=${label}><table>
    ${caption && html`<caption>${caption}</caption>`}
    <thead><tr>${columns.map((c) => html`<th key=${c.name} scope="col" class=${c.number && "n"}>${c.title}${c.unit && html` <span class="unit">${c.unit}</span>`}</th>`)}</tr></thead>
    <tbody>${rows.map((row, at) => html`<tr key=${row.key ?? at} class=${row.class}>
      ${columns.map((c) => html`<td key=${c.name} class=${classes(c.number && "n", c.class)}>${row[c.name] ?? NONE}</td>`)}
    </tr>`)}</tbody>
  </table></div>`;
}

// A dialog that asks before something is changed. Escape and the first button leave everything as it is.
export function Dialog({ title, children, confirm, danger, onConfirm, onClose, busy, error }) {
  const box = useRef(null);
  useEffect(() => {
    const dialog = box.current;
    dialog.showModal();
    return () => dialog.close();
  }, []);
  const cancel = (event) => {
    event.preventDefault();
    onClose();
  };
  return html`<dialog ref=${box} onCancel=${cancel} aria-labelledby="dialog-title">
    <h2 id="dialog-title">${title}</h2>
    <div class="dialog-body">${children}</div>
    ${error && html`<${Message} level="error">${error}<//>`}
    <div class="buttons">
      <button type="button" onClick=${onClose}>Cancel</button>
      <button type="button" class=${danger ? "danger" : "primary"} disabled=${busy} onClick=${onConfirm}>${busy ? "Working…" : confirm}</button>
    </div>
  </dialog>`;
}

// A text editor with numbered lines. Tab leaves it, as it must for those who have no mouse; YAML is indented with spaces.
export function Editor({ value, onInput, label, rows = 18, readOnly }) {
  const gutter = useRef(null);
  const lines = value.split("\n").length;
  const scroll = (event) => {
    gutter.current.scrollTop = event.target.scrollTop;
  };
  return html`<div class="editor">
    <pre ref=${gutter} class="gutter" aria-hidden="true">${Array.from({ length: lines }, (_, n) => n + 1).join("\n")}</pre>
    <textarea aria-label=${label} value=${value} rows=${rows} spellcheck=${false} readonly=${readOnly} wrap="off"
      onInput=${(event) => onInput?.(event.target.value)} onScroll=${scroll}></textarea>
  </div>`;
}

// Before and after of a change, one line each.
export const BeforeAfter = ({ changes }) => html`<table class="change"><thead><tr><th scope="col">What</th><th scope="col">Before</th>
  <td aria-hidden="true"></td><th scope="col">After</th></tr></thead>
  <tbody>${changes.map(([what, before, after]) => html`<tr key=${what}><th scope="row">${what}</th>
    <td class="before">${before}</td><td aria-hidden="true">→</td><td class="after">${after}</td></tr>`)}</tbody></table>`;

// What an asynchronous read gave: {value, error, loading, read_ms, again}, where the value came at `read_ms`. It is read anew
// when `key` changes, and each `period_ms` until it is `enough`.
export function useRead(read, key, period_ms = 0, enough = () => false) {
  const [state, set] = useState({ value: null, error: null, loading: true, read_ms: null });
  const [turn, again] = useState(0);
  useEffect(() => {
    let current = true, timer = 0;
    const once = async () => {
      let done = false;
      try {
        const value = await read();
        done = enough(value);
        if (current) set({ value, error: null, loading: false, read_ms: performance.now() });
      } catch (error) {
        if (current) set((before) => ({ ...before, error, loading: false }));
      }
      if (current && period_ms && !done) timer = setTimeout(once, period_ms);
    };
    once();
    return () => {
      current = false;
      clearTimeout(timer);
    };
  }, [key, turn, period_ms]);
  return { ...state, again: () => again((n) => n + 1) };
}

// Shows a read: its error, or that it is under way, or what `children` makes of its value. A value that could not be read again
// is marked as stale, with its age and the reason.
export function Read({ read, children, what }) {
  const { value, error, read_ms } = read;
  if (value === null) return error ? html`<${Message} level="error">${error.message}<//>` : html`<${Empty}>${what ?? "Reading"}…<//>`;
  return html`${error && html`<${Message} level="warn"><b>Stale:</b> this was read ${seconds(Math.round((performance.now() - read_ms) / 1000))} ago. ${error.message}<//>`}${children(value)}`;
}

// Why a viewer cannot change anything; it stands beside what is disabled.
const WATCH_ONLY = "Your key may watch only. Sign in with an admin key to change anything.";
export const only = (may, not, title) => ({ disabled: !may || Boolean(not), title: may ? title : WATCH_ONLY });
export const WatchOnly = ({ role }) => role !== "admin" && html`<${Message} level="info">${WATCH_ONLY}<//>`;

// Runs one change at a time: [busy, error, run]. `run` returns the answer, or undefined after an error.
export function useChange() {
  const [state, set] = useState({ busy: false, error: null });
  const run = async (change) => {
    set({ busy: true, error: null });
    try {
      const answer = await change();
      set({ busy: false, error: null });
      return answer ?? {};
    } catch (error) {
      set({ busy: false, error: error.message });
      return undefined;
    }
  };
  return [state.busy, state.error, run, () => set({ busy: false, error: null })];
}
