// Control: policies, numbers of engines, single engines. Each change shows before and after, asks, and can be undone.

import { html, useEffect, useState } from "../lib.js";
import { get, post, put } from "../api.js";
import { differences, same, textOf, typeOf, valueOf } from "../forms.js";
import { stateOf } from "../feed.js";
import { useFeed, useLatestEvent } from "../live.js";
import { Absent, BeforeAfter, Dialog, Empty, Message, Panel, Read, Role, State, Table, Tabs, WatchOnly, only, useChange, useRead } from "../ui.js";
import { NONE, count, dateClock, seconds, short, words } from "../format.js";

const STAGES = [["prefill", "Prefill"], ["decode", "Decode"], ["admission", "Admission"], ["fairness", "Fairness"], ["flow", "Flow"], ["dispatch", "Dispatcher"]];

export function Control({ role }) {
  const [done, setDone] = useState(0); // grows with each change, so that what it changed is read again
  const may = role === "admin";
  const [last, setLast] = useState(null);
  const changed = (change) => {
    setLast(change);
    setDone((n) => n + 1);
  };
  return html`<${WatchOnly} role=${role} />
    ${last && html`<${Message} level="ok">Done: ${last.what}. The audit log below can undo it.<//>`}
    <div class="control">
      <${Policies} may=${may} done=${done} onChanged=${changed} />
      <div class="stack">
        <${Scaling} may=${may} done=${done} onChanged=${changed} />
        <${OneEngine} may=${may} onChanged=${changed} />
      </div>
      <${Audit} may=${may} done=${done} onChanged=${changed} />
    </div>`;
}

// Asks about a change, makes it, and shows what the server says if it refuses. `ask` is {title, changes, text, confirm, danger, act}.
function Ask({ ask, onClose, onChanged }) {
  const [busy, error, run] = useChange();
  const confirm = async () => {
    const answer = await run(ask.act);
    if (answer !== undefined) {
      onClose();
      onChanged({ what: ask.title });
    }
  };
  return html`<${Dialog} title=${ask.title} confirm=${ask.confirm} danger=${ask.danger} busy=${busy} error=${error} onConfirm=${confirm} onClose=${onClose}>
    ${ask.text && html`<p>${ask.text}</p>`}
    ${ask.changes && html`<${BeforeAfter} changes=${ask.changes.map(([what, before, after]) => [what, show(before), show(after)])} />`}
  <//>`;
}

const show = (value) => (value === undefined ? "not set" : short(value, 90));

// --------------------------------------------------------------------------------------------------------- policies

const OTHERS = ["policy", "router_found"]; // events after which the router's policies may be others than those that were read
const RETRY_MS = 5000;

function Policies({ may, done, onChanged }) {
  const latest = useLatestEvent(OTHERS);
  // read once after each change, whoever made it; again only until it could be read
  const read = useRead(() => get("/api/policy"), `${done} ${latest}`, RETRY_MS, () => true);
  const [stage, setStage] = useState("prefill");
  return html`<${Panel} title="Policies" name="policies" actions=${html`<${Tabs} tabs=${STAGES} at=${stage} onChange=${setStage} label="Stage" />`}>
    <${Read} read=${read} what="Asking the router">${(policy) => {
      if (stage === "dispatch") return html`<${ParameterForm} key=${stage} stage=${stage} current=${{ params: policy.dispatch }} may=${may} onChanged=${onChanged} />`;
      if (!policy[stage]) return html`<${Absent} what="KV transfers are not scheduled." why="There is no flow agent: set flow in the configuration to have transfers ordered." />`;
      return html`<${ParameterForm} key=${stage} stage=${stage} current=${policy[stage]} available=${policy.available?.[stage] ?? {}} may=${may} onChanged=${onChanged} />`;
    }}<//>
  <//>`;
}

// The form shows what is in use, and follows it. What a person has chosen and typed stays beside what others change meanwhile,
// until it is sent or reset.
function ParameterForm({ stage, current, available, may, onChanged }) {
  // {name, texts, base, sent}: the policy that was chosen, what was typed by parameter, what was in use when that began, and
  // whether it was sent and has not been read back
  const [kept, keep] = useState(null);
  const [problem, setProblem] = useState(null);
  const [ask, setAsk] = useState(null);
  const inUse = { name: current.name, params: current.params };
  const defaultsOf = (name) => available?.[name]?.params ?? current.params;
  // what a policy begins with, before anything is typed; one that was in use when it was edited keeps its parameters
  const paramsOf = (name, base) => (name === current.name ? current.params : name === base?.name ? base.params : defaultsOf(name));
  const isEdited = ({ name, texts, base, sent }) => !(sent && !same(base, inUse))
    && (name !== current.name || Object.entries(texts).some(([key, text]) => text !== textOf(paramsOf(name, base)[key])));
  const draft = kept && isEdited(kept) ? kept : null;
  // what has come to be in use, because it was sent or by somebody else, must not come back as edited after a later change
  useEffect(() => {
    keep((last) => (last && !isEdited(last) ? null : last));
  }, [JSON.stringify(inUse)]);

  const name = draft ? draft.name : current.name, texts = draft?.texts ?? {};
  const chosen = available ? available[name] ?? current : current;
  const defaults = defaultsOf(name), begin = paramsOf(name, draft?.base);
  const edit = (part) => keep({ name, texts, base: draft?.base ?? inUse, sent: false, ...part });
  const choose = (other) => {
    edit({ name: other, texts: {} });
    setProblem(null);
  };
  const reset = () => {
    keep(null);
    setProblem(null);
  };
  const sent = (change) => {
    keep({ name, texts, base: inUse, sent: true });
    onChanged(change);
  };
  const review = (event) => {
    event.preventDefault();
    let params;
    try {
      params = Object.fromEntries(Object.keys(begin).map((key) => [key, key in texts ? valueOf(texts[key], typeOf(defaults[key] ?? begin[key]), key) : begin[key]]));
    } catch (error) {
      setProblem(error.message);
      return;
    }
    setProblem(null);
    const before = name === current.name ? current.params : defaults;
    const changes = name !== current.name ? [[`${stage} policy`, current.name, name]] : [];
    for (const [key, value] of Object.entries(params)) if (!same(value, before[key])) changes.push([`${stage}.${key}`, before[key], value]);
    if (!changes.length) {
      setProblem("Nothing differs from what is in use.");
      return;
    }
    const body = available
      ? { [stage]: { name, params: Object.fromEntries(Object.entries(params).filter(([key, value]) => !same(value, defaults[key]))) } }
      : { dispatch: Object.fromEntries(Object.entries(params).filter(([key, value]) => !same(value, before[key]))) };
    setAsk({
      title: available ? `Change the ${stage} policy` : "Change the dispatcher's limits", changes, confirm: "Change",
      text: "It holds from the next decision on, until the router restarts.", act: () => put("/api/policy", body),
    });
  };
  return html`<form onSubmit=${review} class="params-form">
    ${draft && !draft.sent && html`<${Meanwhile} changes=${differences(draft.base, inUse)} />`}
    ${available && html`<label class="field">Policy <select aria-label="Policy" value=${name} ...${only(may)} onChange=${(e) => choose(e.target.value)}>
      ${Object.keys(available).sort().map((one) => html`<option key=${one} value=${one}>${one}${one === current.name ? " (in use)" : ""}</option>`)}</select></label>`}
    ${chosen.formula && html`<p class="formula-line mono">${chosen.formula}</p>`}
    ${Object.keys(begin).length === 0 ? html`<${Empty}>This policy has no parameters.<//>` : html`<div class="table-box" tabindex="0" role="group" aria-label="Parameters"><table class="params">
      <thead><tr><th scope="col">Parameter</th><th scope="col">Type</th><th scope="col" class="n">${available ? "Default" : "In use"}</th><th scope="col">Value</th></tr></thead>
      <tbody>${Object.keys(begin).map((key) => html`<${Parameter} key=${`${name} ${key}`} name=${key} value=${begin[key]} fallback=${defaults[key]} text=${texts[key]} may=${may}
        onInput=${(text) => edit({ texts: { ...texts, [key]: text } })} />`)}</tbody></table></div>`}
    ${problem && html`<${Message} level="error">${problem}<//>`}
    <div class="buttons">
      <button type="button" disabled=${!draft} onClick=${reset}>Reset</button>
      <button type="submit" class="primary" ...${only(may, !draft)}>Review the change</button>
    </div>
    ${ask && html`<${Ask} ask=${ask} onClose=${() => setAsk(null)} onChanged=${sent} />`}
  </form>`;
}

const MOST_TOLD = 4;

// Says what has changed under a form that is being edited.
function Meanwhile({ changes }) {
  if (!changes.length) return null;
  const told = changes.slice(0, MOST_TOLD).map(([path, before, after]) => `${path === "name" ? "policy" : path.replace(/^params\./, "")} ${show(before)} → ${show(after)}`);
  const more = changes.length - told.length;
  return html`<${Message} level="warn"><b>Changed meanwhile:</b> ${told.join(", ")}${more > 0 && `, and ${more} more`}. What you chose and typed stays; Reset shows what is in use.<//>`;
}

function Parameter({ name, value, fallback, text, may, onInput }) {
  const type = typeOf(fallback ?? value);
  const shown = text ?? textOf(value);
  const differs = shown !== textOf(fallback), typed = text !== undefined && text !== textOf(value);
  const props = { "aria-label": name, ...only(may) };
  return html`<tr class=${typed && "typed"}><th scope="row" class="mono">${name}</th><td class="note">${type}</td><td class="n note">${short(fallback, 24)}</td>
    <td class=${differs && "differs"}>${type === "true or false"
      ? html`<select ...${props} value=${shown} onChange=${(e) => onInput(e.target.value)}><option value="true">true</option><option value="false">false</option></select>`
      : html`<input ...${props} class="mono" value=${shown} inputmode=${type === "number" ? "decimal" : undefined} onInput=${(e) => onInput(e.target.value)} />`}</td></tr>`;
}

// ---------------------------------------------------------------------------------------------------------- scaling

const BOUNDS = [["min", "Fewest replicas"], ["max", "Most replicas, warm ones among them"], ["warm", "Replicas that wait warm"], ["warm_max", "Most that may wait warm"]];
const boundOf = (group, key) => (key === "warm" ? group.keeps_warm : group[key]);
const some = (order) => Object.keys(order).length > 0;

function Scaling({ may, done, onChanged }) {
  const read = useRead(() => get("/api/scale"), done, 5000);
  const [texts, setTexts] = useState({}); // what was typed: "decode" is a number of engines, "decode.max" a bound
  const [planned, setPlanned] = useState(null); // what a dry run answered, and after how many changes
  const [ask, setAsk] = useState(null);
  const [busy, error, run] = useChange();
  const plan = planned?.done === done ? planned.answer : null; // a later change has made another plan
  // at once, not in an effect: an effect may come after the user's next key, and would take it away
  const ordered = (change) => {
    setTexts({});
    onChanged(change);
  };
  if (read.error?.status === 404) return html`<${Panel} title="Numbers of engines"><${Absent} what="No autoscaler runs, so numbers are those of the configuration." why=${read.error.message} /><//>`;
  return html`<${Panel} title="Numbers of engines"><${Read} read=${read} what="Asking the autoscaler">${(scale) => {
    const present = (group) => group.wanted ?? group.active;
    const counts = {}, bounds = {};
    let bad = null;
    for (const [at, text] of Object.entries(texts)) {
      if (text.trim() === "") continue;
      const [name, key] = at.split("."), n = Number(text);
      if (!Number.isInteger(n) || n < 0) bad = "A number is a whole number, 0 or more.";
      if (key) (bounds[name] ??= {})[key] = n;
      else counts[name] = n;
    }
    if (some(counts) && some(bounds)) bad = "Numbers and bounds are set one after the other: empty one of them.";
    const order = some(bounds) ? { bounds } : some(counts) ? { counts } : {};
    const number = (at, label, now) => html`<input class="count" inputmode="numeric" aria-label=${label} ...${only(may)} placeholder=${String(now)}
      value=${texts[at] ?? ""} onInput=${(e) => setTexts({ ...texts, [at]: e.target.value })} />`;
    const dry = async () => {
      const answer = await run(() => put("/api/scale", { ...order, plan: true }));
      if (answer) setPlanned({ done, answer });
    };
    const set = () => setAsk({
      title: "Set numbers of engines", confirm: "Set", act: () => put("/api/scale", order),
      text: "These numbers rule until the policy decides again; the group's bounds hold.",
      changes: Object.entries(counts).map(([name, n]) => [name, present(scale.groups.find((group) => group.name === name)), n]),
    });
    const limit = () => setAsk({
      title: "Set bounds", confirm: "Set", act: () => put("/api/scale", order), text: "They rule until the configuration has others, or the application is deleted.",
      changes: scale.groups.flatMap((group) => Object.entries(bounds[group.name] ?? {}).map(([key, n]) => [`${group.name}.${key}`, boundOf(group, key), n])),
    });
    const auto = () => setAsk({
      title: "Let the scaling policy decide", confirm: "Let it decide", act: () => put("/api/scale", { mode: "auto" }),
      changes: [["mode", scale.mode, "auto"]],
    });
    return html`
      <p class="facts"><span>mode <b>${scale.mode}</b>${scale.by && html` <span class="note">by ${scale.by}</span>`}</span><span>policy <b>${scale.policy?.name ?? NONE}</b></span>
        ${scale.phase && html`<span>phase <b>${scale.phase}</b></span>`}<span class="note">observed ${scale.observed_for_s === null ? "never" : `${seconds(scale.observed_for_s)} ago`}</span></p>
      ${scale.held && html`<${Message} level="warn">Held: ${scale.held}<//>`}
      <div class="table-box" tabindex="0" role="group" aria-label="Groups"><table>
        <thead><tr><th scope="col">Group</th><th scope="col">Role</th><th scope="col" class="n">Replicas</th><th scope="col" class="n">Active</th>
          <th scope="col" class="n">Warm</th><th scope="col" class="n">Starting</th><th scope="col" class="n" title="Have not started in time and count as none">Overdue</th>
          <th scope="col" class="n">Draining</th><th scope="col">Set to</th></tr></thead>
        <tbody>${scale.groups.map((group) => html`<tr key=${group.name}><th scope="row">${group.name}</th><td><${Role} role=${group.role} /></td><td class="n">${count(group.replicas)}</td><td class="n">${count(group.active)}</td><td class="n">${count(group.warm)}</td><td class="n">${count(group.starting)}</td><td class="n">${count(group.overdue)}</td><td class="n">${count(group.draining)}</td>
          <td>${number(group.name, `engines of ${group.name}`, present(group))}</td></tr>`)}</tbody></table></div>
      <div class="table-box" tabindex="0" role="group" aria-label="Bounds"><table>
        <thead><tr><th scope="col">Bounds</th>${BOUNDS.map(([key, title]) => html`<th key=${key} scope="col" title=${title}>${words(key)}</th>`)}<th scope="col">Configured</th></tr></thead>
        <tbody>${scale.groups.map((group) => html`<tr key=${group.name}><th scope="row">${group.name}</th>
          ${BOUNDS.map(([key]) => html`<td key=${key}>${number(`${group.name}.${key}`, `${key} of ${group.name}`, boundOf(group, key))}</td>`)}
          <td class="note">${BOUNDS.map(([key]) => group.configured[key]).join(", ")}</td></tr>`)}</tbody></table></div>
      ${(error || bad) && html`<${Message} level="error">${bad ?? error}<//>`}
      <div class="buttons">
        <button type="button" ...${only(may, busy || bad, "Shows the plan and changes nothing")} onClick=${dry}>Plan only</button>
        <button type="button" ...${only(may, scale.mode === "auto")} onClick=${auto}>Let the policy decide</button>
        <button type="button" ...${only(may, bad || !some(bounds))} onClick=${limit}>Set these bounds</button>
        <button type="button" class="primary" ...${only(may, bad || !some(counts))} onClick=${set}>Set these numbers</button>
      </div>
      <${Plan} scale=${plan ?? scale} dry=${plan !== null} />
      ${ask && html`<${Ask} ask=${ask} onClose=${() => setAsk(null)} onChanged=${ordered} />`}`;
  }}<//><//>`;
}

function Plan({ scale, dry }) {
  const plan = scale.plan;
  return html`<div class="plan" aria-label="Plan" role="region">
    <h3>${dry ? "Plan, if these numbers were set (nothing is changed)" : "Plan in force"}</h3>
    ${plan ? html`<p>${Object.entries(plan.serving).filter(([, n]) => n > 0).map(([role, n]) => `${n} ${role}`).join(", ") || "no engine"} to serve, ${count(plan.warm)} warm.</p>` : html`<p class="note">There is no plan yet.</p>`}
    <ul>${plan?.moves.map((move, n) => html`<li key=${`m${n}`}><b>${move.way}</b> ${move.engine || "one more"} <span class="note">(${move.role})</span></li>`)}
      ${plan?.engines.map((order) => html`<li key=${`o ${order.engine}`}><b>order</b> ${order.engine}: ${order.role}, ${order.duty}</li>`)}
      ${Object.entries(plan?.replicas ?? {}).map(([name, n]) => html`<li key=${`r ${name}`}><b>order</b> ${name}: ${n} replicas</li>`)}
      ${scale.reasons.map((reason, n) => html`<li key=${`w${n}`} class="reason"><b>because</b> ${reason}</li>`)}
      ${scale.notes.map((note, n) => html`<li key=${`n${n}`}><b>note</b> ${note}</li>`)}</ul>
  </div>`;
}

// ------------------------------------------------------------------------------------------------------- one engine

const ROLE_NAMES = ["prefill", "decode", "colocated"];

function OneEngine({ may, onChanged }) {
  const feed = useFeed();
  const [id, setId] = useState("");
  const [ask, setAsk] = useState(null);
  const ids = feed.groups().flatMap((group) => group.ids);
  const engine = feed.engines.get(id);
  const at = encodeURIComponent(id);
  const duty = engine?.duty === "warm" ? "active" : "warm";
  const props = only(may, !engine);
  return html`<${Panel} title="One engine">
    <label class="field">Engine <input aria-label="Engine" list="engine-ids" value=${id} placeholder="choose or type an id" onInput=${(e) => setId(e.target.value)} />
</label>
    <datalist id="engine-ids">${ids.map((one) => html`<option key=${one} value=${one}></option>`)}</datalist>
    ${engine ? html`<p class="facts"><${Role} role=${engine.role} home=${engine.home_role} /><${State} state=${stateOf(engine)} /><span class="live">${count(engine.running)} running, ${count(engine.waiting)} waiting, ${count(engine.leases)} leases</span></p>`
      : html`<p class="note">${id ? `There is no engine ${short(id, 40)}.` : "Choose an engine to change its role or duty, or to drain it."}</p>`}
    <div class="buttons left">
      <label class="inline">Role <select aria-label="Role" ...${props} value=${engine?.role ?? ""} onChange=${(e) => {
        const role = e.target.value;
        e.target.value = engine.role;
        setAsk({ title: `Change the role of ${id}`, confirm: "Change", changes: [["role", engine.role, role]], text: "Its running work goes on; new work comes for the new role.", act: () => put(`/api/engines/${at}`, { role }) });
      }}>${!engine && html`<option value=""></option>`}${ROLE_NAMES.map((role) => html`<option key=${role} value=${role}>${role}</option>`)}</select></label>
      <button type="button" ...${props} onClick=${() => setAsk({ title: duty === "warm" ? `Make ${id} warm` : `Activate ${id}`, confirm: duty === "warm" ? "Make warm" : "Activate",
        changes: [["duty", engine.duty, duty]], act: () => put(`/api/engines/${at}`, { duty }) })}>${duty === "warm" ? "Make warm" : "Activate"}</button>
      <button type="button" class="danger" ...${props} onClick=${() => setAsk({ title: `Drain ${id}`, confirm: "Drain", danger: true, changes: [["duty", engine.duty, "warm"]],
        text: "It takes no new work; what runs there may end. Activating it brings it back.", act: () => post(`/api/engines/${at}/drain`) })}>Drain</button>
    </div>
    ${ask && html`<${Ask} ask=${ask} onClose=${() => setAsk(null)} onChanged=${onChanged} />`}
  <//>`;
}

// ------------------------------------------------------------------------------------------------------------ audit

const ADMINS = ["admin"]; // events after which the log has another line

function Audit({ may, done, onChanged }) {
  const latest = useLatestEvent(ADMINS);
  const read = useRead(() => get("/api/audit"), `${done} ${latest}`, 10000);
  const [ask, setAsk] = useState(null);
  return html`<${Panel} title="Audit log" wide=${true}><${Read} read=${read} what="Reading the log">${({ changes }) => html`
    <${Table} label="Audit log" empty="Nothing has been changed from here since the dashboard started." columns=${[
      { name: "at", title: "At" }, { name: "who", title: "Who" }, { name: "what", title: "What" }, { name: "change", title: "Before → after", class: "wide-cell" }, { name: "undo", title: "Undo" }]}
      rows=${[...changes].sort((a, b) => b.at - a.at).map((one) => {
        const leaves = differences(one.before, one.after);
        return {
          key: one.id, at: dateClock(one.at), who: one.who, what: words(one.what), class: one.undone && "undone",
          change: leaves.length === 0 ? NONE : html`<ul class="leaves">${leaves.slice(0, 6).map(([path, before, after]) => html`<li key=${path}>${path && html`<span class="mono">${path}</span> `}<span class="before">${show(before)}</span> → <span class="after">${show(after)}</span></li>`)}
            ${leaves.length > 6 && html`<li class="note">and ${leaves.length - 6} more</li>`}</ul>`,
          undo: one.undone ? html`<span class="note">undone</span>` : one.can_undo
            ? html`<button type="button" ...${only(may)} onClick=${() => setAsk({ title: `Undo: ${words(one.what)}`, confirm: "Undo",
                changes: leaves.slice(0, 12).map(([path, before, after]) => [path || words(one.what), after, before]), act: () => post("/api/undo", { id: one.id }) })}>Undo</button>`
            : html`<span class="note">cannot be undone</span>`,
        };
      })} />`}<//>
    ${ask && html`<${Ask} ask=${ask} onClose=${() => setAsk(null)} onChanged=${onChanged} />`}
  <//>`;
}
