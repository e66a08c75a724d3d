// Engines: a map with a cell for each engine, and a lane for each, by group. Only the lanes on the screen are in the page.

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../lib.js";
import { get } from "../api.js";
import { stateOf, totals } from "../feed.js";
import { onUpdate, orWaiting, useFeed } from "../live.js";
import { Bar, Empty, Panel, Role, State, Tabs, classes } from "../ui.js";
import { HeatScale, HeatStrip, context, heatColour } from "../heat.js";
import { colour, onTheme } from "../theme.js";
import { NONE, count, known, percent, seconds, words } from "../format.js";

const LANE = 34, HEAD = 34, EXTRA = 6; // heights in pixels as app.css has them, and lanes drawn beyond the edge
const HEAT_PERIOD_MS = 10000, MOST_HEAT = 128; // the server's bins are 10 s long; it answers for this many engines

const slots = (engine) => (known(engine.running) && engine.slots ? engine.running / engine.slots : null);

const MEASURES = {
  slots: ["slots in use", slots],
  kv: ["KV in use", (engine) => engine.kv_usage],
  waiting: ["waiting", (engine) => (known(engine.waiting) && engine.slots ? engine.waiting / engine.slots : null)],
};

export function Engines() {
  const feed = useFeed();
  const [measure, setMeasure] = useState("slots");
  const [filter, setFilter] = useState("");
  const [closed, setClosed] = useState([]);
  const [picked, setPicked] = useState(null);
  const groups = feed.groups();
  const wanted = filter.trim().toLowerCase();
  const fits = (engine) => !wanted || `${engine.id} ${engine.role} ${engine.node} ${stateOf(engine)} ${engine.kind}`.toLowerCase().includes(wanted);
  const rows = [];
  for (const group of groups) {
    const ids = wanted ? group.ids.filter((id) => fits(feed.engines.get(id))) : group.ids;
    if (!ids.length) continue;
    const open = !closed.includes(group.name);
    rows.push({ group: group.name, ids, open, height: HEAD });
    if (open) for (const id of ids) rows.push({ id, height: LANE });
  }
  const toggle = (name) => setClosed(closed.includes(name) ? closed.filter((one) => one !== name) : [...closed, name]);
  const pick = (id) => {
    const group = feed.engines.get(id)?.group;
    setClosed(closed.filter((one) => one !== group));
    setFilter("");
    setPicked(id);
  };
  return html`<div class="view-head">
      <${Tabs} tabs=${Object.entries(MEASURES).map(([id, [title]]) => [id, title])} at=${measure} onChange=${setMeasure} label="What the map shows" />
      <label class="inline">Find <input type="search" value=${filter} placeholder="id, role, node, state" onInput=${(e) => setFilter(e.target.value)} /></label>
      <span class="note">${feed.engines.size > 0 && `${count(feed.engines.size)} ${feed.engines.size === 1 ? "engine" : "engines"} in ${groups.length} ${groups.length === 1 ? "group" : "groups"}`}</span>
      <span class="grow"></span><${HeatScale} />
    </div>
    ${feed.engines.size === 0 ? html`<${Empty}>${orWaiting("No engine has announced itself to the router yet.")}<//>` : html`
      <${Panel} title="Fleet" unit=${`one cell per engine, ${MEASURES[measure][0]}`} name="map-panel"><${FleetMap} groups=${groups} measure=${measure} onPick=${pick} picked=${picked} /><//>
      <${Lanes} rows=${rows} feed=${feed} onToggle=${toggle} picked=${picked} onPick=${setPicked} />`}`;
}

// -------------------------------------------------------------------------------------------------------------- map

const BAND = 17; // height of a group's name

// Where each cell of the map stands: cells as large as all of them fit into few rows.
function layout(groups, width) {
  const most = groups.reduce((sum, group) => sum + group.ids.length, 0);
  const cell = most > 400 ? 12 : most > 100 ? 18 : 24;
  const cells = [], names = [];
  let x = 0, top = 0, bottom = 0;
  for (const group of groups) {
    const columns = Math.max(1, Math.floor(width / cell));
    const needed = Math.max(Math.min(group.ids.length, columns) * cell, 7 * group.name.length + 60);
    if (x > 0 && x + needed > width) {
      x = 0;
      top = bottom + 5;
    }
    names.push({ text: group.name, n: group.ids.length, x, y: top });
    group.ids.forEach((id, n) => cells.push({ id, x: x + (n % columns) * cell, y: top + BAND + Math.floor(n / columns) * cell, size: cell - 2 }));
    bottom = Math.max(bottom, top + BAND + Math.ceil(group.ids.length / columns) * cell);
    x += needed + 28;
  }
  return { cells, names, height: bottom + 2 };
}

function FleetMap({ groups, measure, onPick, picked }) {
  const box = useRef(null), canvas = useRef(null);
  const [width, setWidth] = useState(0);
  const [over, setOver] = useState(null);
  const feed = useFeed();
  const plan = useMemo(() => layout(groups, width || 1000), [groups, width]);
  useLayoutEffect(() => {
    const sizes = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    sizes.observe(box.current);
    return () => sizes.disconnect();
  }, []);
  useEffect(() => {
    const draw = () => width > 0 && drawMap(canvas.current, plan, width, feed, MEASURES[measure][1], picked);
    draw();
    const off = [onTheme(draw), onUpdate(draw)];
    return () => off.forEach((one) => one());
  }, [plan, width, measure, picked]);
  const find = (event) => {
    const { left, top } = canvas.current.getBoundingClientRect();
    const x = event.clientX - left, y = event.clientY - top;
    return plan.cells.find((cell) => x >= cell.x && x < cell.x + cell.size + 2 && y >= cell.y && y < cell.y + cell.size + 2);
  };
  const shown = over && feed.engines.get(over.id);
  return html`<div class="map" ref=${box}>
    <canvas ref=${canvas} style=${{ height: `${plan.height}px` }} role="img"
      aria-label="Load of each engine; the lanes below have the same figures as text" onMouseMove=${(e) => setOver(find(e) ?? null)}
      onMouseLeave=${() => setOver(null)} onClick=${(e) => { const cell = find(e); if (cell) onPick(cell.id); }}></canvas>
    ${shown && html`<div class="chart-tip map-tip" style=${{ left: `${Math.min(over.x, width - 230)}px`, top: `${over.y + over.size + 4}px` }}>
      ${`${shown.id}\n${shown.role}, ${stateOf(shown)}\nslots ${count(shown.running)} of ${count(shown.slots)}, waiting ${count(shown.waiting)}, KV ${percent(shown.kv_usage, 0)}`}</div>`}
  </div>`;
}

// A cell is filled by its measure; what does not serve is hollow, with a cross where it is trouble.
function drawMap(canvas, plan, width, feed, value, picked) {
  const ctx = context(canvas, width, plan.height);
  ctx.font = "600 11px system-ui, sans-serif";
  ctx.textBaseline = "top";
  for (const name of plan.names) {
    ctx.fillStyle = colour("--text");
    ctx.fillText(name.text, name.x, name.y + 2);
    const wide = ctx.measureText(name.text).width;
    ctx.fillStyle = colour("--muted");
    ctx.fillText(` ${name.n}`, name.x + wide + 3, name.y + 2);
  }
  ctx.lineWidth = 1;
  for (const { id, x, y, size } of plan.cells) {
    const engine = feed.engines.get(id);
    if (!engine) continue;
    const state = stateOf(engine), share = value(engine);
    if (state === "ready" && known(share)) {
      ctx.fillStyle = heatColour(share);
      ctx.fillRect(x, y, size, size);
    } else {
      const trouble = state !== "warm" && state !== "starting";
      ctx.strokeStyle = colour(state === "down" ? "--error" : trouble ? "--warn" : "--muted");
      ctx.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
      ctx.beginPath();
      if (trouble) {
        ctx.moveTo(x + 3, y + 3);
        ctx.lineTo(x + size - 3, y + size - 3);
        ctx.moveTo(x + size - 3, y + 3);
        ctx.lineTo(x + 3, y + size - 3);
      } else {
        ctx.arc(x + size / 2, y + size / 2, 1.5, 0, 7);
      }
      ctx.stroke();
    }
    if (id === picked) {
      ctx.strokeStyle = colour("--focus");
      ctx.lineWidth = 2;
      ctx.strokeRect(x - 1, y - 1, size + 2, size + 2);
      ctx.lineWidth = 1;
    }
  }
}

// ------------------------------------------------------------------------------------------------------------ lanes

function Lanes({ rows, feed, onToggle, picked, onPick }) {
  const box = useRef(null);
  const [view, setView] = useState({ top: 0, height: 600 });
  const tops = useMemo(() => {
    let top = 0;
    return rows.map((row) => {
      const at = top;
      top += row.height;
      return at;
    });
  }, [rows.length, rows.map((row) => row.height).join("")]);
  const height = rows.length ? tops.at(-1) + rows.at(-1).height : 0;
  useLayoutEffect(() => {
    const sizes = new ResizeObserver(() => setView((was) => ({ ...was, height: box.current.clientHeight })));
    sizes.observe(box.current);
    return () => sizes.disconnect();
  }, []);
  useEffect(() => {
    const at = rows.findIndex((row) => row.id === picked);
    const { scrollTop, clientHeight } = box.current;
    const inSight = at >= 0 && tops[at] >= scrollTop && tops[at] + LANE <= scrollTop + clientHeight;
    if (at >= 0 && !inSight) box.current.scrollTop = Math.max(0, tops[at] - 3 * LANE);
  }, [picked]);
  const shown = [];
  for (let at = 0; at < rows.length; at += 1) {
    if (tops[at] + rows[at].height < view.top - EXTRA * LANE) continue;
    if (tops[at] > view.top + view.height + EXTRA * LANE) break;
    shown.push(at);
  }
  const heat = useHeat(shown.map((at) => rows[at].id).filter(Boolean).slice(0, MOST_HEAT));
  // whoever closes the details by the keyboard goes on at the lane from which they were opened
  const close = () => {
    (box.current.querySelector(".lane.picked .id") ?? box.current).focus();
    onPick(null);
  };
  return html`<section class="panel lanes-panel" aria-label="Lanes">
    <div class="lane lane-names" aria-hidden="true">
      <span>engine</span><span>role</span><span>state</span><span>slots in use</span><span class="n">waiting</span><span>KV in use</span>
      <span class="n">leases</span><span>node</span><span>last 10 min: slots above, KV below</span>
    </div>
    <div class="lanes" ref=${box} tabindex="0" role="group" aria-label="Engines by group" onScroll=${(e) => setView({ top: e.target.scrollTop, height: e.target.clientHeight })}>
      ${rows.length === 0 && html`<${Empty}>No engine fits.<//>`}
      <div class="lanes-all" style=${{ height: `${height}px` }}>
        ${shown.map((at) => {
          const row = rows[at], style = { top: `${tops[at]}px` };
          if (row.group) return html`<${GroupHead} key=${`g ${row.group}`} row=${row} feed=${feed} style=${style} onToggle=${onToggle} />`;
          const engine = feed.engines.get(row.id);
          return engine && html`<${Lane} key=${row.id} engine=${engine} heat=${heat[row.id]} style=${style} picked=${row.id === picked} onPick=${onPick} />`;
        })}
      </div>
    </div>
    ${picked && feed.engines.has(picked) && html`<${Details} engine=${feed.engines.get(picked)} onClose=${close} />`}
  </section>`;
}

function GroupHead({ row, feed, style, onToggle }) {
  const sum = totals(row.ids.map((id) => feed.engines.get(id)).filter(Boolean));
  const states = Object.entries(sum.states).sort().map(([state, n]) => `${n} ${state}`).join(", ");
  return html`<div class="lane-group" style=${style}>
    <button type="button" class="fold" aria-expanded=${String(row.open)} onClick=${() => onToggle(row.group)}>
      <span aria-hidden="true">${row.open ? "▾" : "▸"}</span> ${row.group}</button>
    <span>${count(sum.engines)} ${sum.engines === 1 ? "engine" : "engines"}: ${states}</span>
    <span class="live">slots ${count(sum.running)} of ${count(sum.slots)}</span>
    <span class="live">waiting ${count(sum.waiting)}</span>
    <span class="live">KV ${percent(sum.kv, 0)} mean, ${percent(sum.kvMost, 0)} most</span>
    <span class="live">leases ${count(sum.leases)}</span>
  </div>`;
}

function Lane({ engine, heat, style, picked, onPick }) {
  const state = stateOf(engine);
  return html`<div class=${classes("lane", picked && "picked", state !== "ready" && "off")} style=${style}>
    <button type="button" class="link id" title=${engine.id} onClick=${() => onPick(picked ? null : engine.id)} aria-expanded=${String(picked)}>${engine.id}</button>
    <${Role} role=${engine.role} home=${engine.home_role} />
    <${State} state=${state} />
    <${Bar} share=${slots(engine)} text=${`${count(engine.running)} / ${count(engine.slots)}`} label="running sequences of slots" />
    <span class="n live">${count(engine.waiting)}</span>
    <${Bar} share=${engine.kv_usage} text=${percent(engine.kv_usage, 0)} kind="kv" label=${`${count(engine.kv_blocks_used)} of ${count(engine.kv_blocks_total)} blocks`} />
    <span class="n live">${count(engine.leases)}</span>
    <span class="node" title=${engine.node}>${engine.node ?? NONE}</span>
    <${HeatStrip} heat=${heat} label=${`load of ${engine.id} in the last ten minutes`} />
  </div>`;
}

const STEPS = [["process_s", "process"], ["weights_s", "weights"], ["post_load_s", "after the load"], ["announce_s", "announce"]];

function Details({ engine, onClose }) {
  return html`<div class="details" role="region" aria-label=${`Details of ${engine.id}`}>
    <h3>${engine.id}</h3>
    <dl>
      <div><dt>kind</dt><dd>${engine.kind ?? NONE}</dd></div>
      <div><dt>duty</dt><dd>${engine.duty ?? NONE}</dd></div>
      <div><dt>home role</dt><dd>${engine.home_role ?? NONE}</dd></div>
      <div><dt>KV blocks</dt><dd class="live">${count(engine.kv_blocks_used)} of ${count(engine.kv_blocks_total)}</dd></div>
      <div><dt>node</dt><dd>${engine.node ?? NONE}</dd></div>
      ${STEPS.map(([key, title]) => html`<div key=${key}><dt>start: ${title}</dt><dd>${seconds(engine.started?.[key])}</dd></div>`)}
      <div><dt>quarantine</dt><dd>${engine.quarantine?.length
        ? engine.quarantine.map((one) => `${words(one.reason)} for ${seconds(one.for_s)}, ${one.probing ? "probing now" : `probe in ${seconds(one.probe_in_s)}`}`).join("; ")
        : "none"}</dd></div>
    </dl>
    <button type="button" onClick=${onClose}>Close</button>
  </div>`;
}

// The heat of these engines, read again as time goes on and when others come into view.
function useHeat(ids) {
  const [heat, setHeat] = useState({});
  const wanted = useRef(ids);
  wanted.current = ids;
  const key = ids.join();
  useEffect(() => {
    let current = true, timer = 0;
    const read = async () => {
      const asked = wanted.current;
      if (asked.length) {
        try {
          const answer = await get(`/api/engines/heat?ids=${asked.map(encodeURIComponent).join()}`);
          if (current) setHeat(answer.engines);
        } catch {
          // strips stay as they are; the line of state says that the server is away
        }
      }
      if (current) timer = setTimeout(read, HEAT_PERIOD_MS);
    };
    timer = setTimeout(read, 150); // scrolling settles first
    return () => {
      current = false;
      clearTimeout(timer);
    };
  }, [key]);
  return heat;
}
