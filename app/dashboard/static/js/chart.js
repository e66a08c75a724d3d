// Line charts over time: uPlot, with the colours of the theme, objectives as lines, and events as marks through all charts.

import { html, uPlot, useEffect, useLayoutEffect, useRef } from "./lib.js";
import { clock, known, number, seconds } from "./format.js";
import { colour, onTheme } from "./theme.js";
import { feed, onUpdate } from "./live.js";

const FONT = "11px system-ui, sans-serif";
const NEAR_PX = 5; // a mark is under the pointer within this distance
const CLOCK_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 180, 300, 600, 900]; // seconds between the ticks of a time of day
const WHOLE_STEPS = [1, 10, 100, 1e3, 1e4, 1e5, 1e6].flatMap((ten) => [ten, 2 * ten, 5 * ten]); // of a y axis that counts
const FAR = 2.5; // an objective beyond this many times the largest value is named at the edge instead of drawn
const WIDE = 1700; // on a page this wide in CSS pixels charts are higher
const LEVEL_COLOURS = { info: "--mark", warn: "--warn", error: "--error" };

export const SERIES_COLOURS = ["--s1", "--s2", "--s3", "--s4", "--s5", "--s6", "--s7", "--s8"];
export const colourOf = (index) => SERIES_COLOURS[index % SERIES_COLOURS.length];

const axis = (extra) => ({
  font: FONT, labelFont: FONT, labelSize: 14, labelGap: 2, gap: 4, stroke: colour("--muted"),
  grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false }, ...extra,
});

const clockTicks = (plot, splits, _axis, _space, step) => splits.map((t) => (step >= 60 ? clock(t).slice(0, 5) : clock(t)));
const spanTicks = (plot, splits) => splits.map((s) => (s >= 600 ? `${number(s / 60)} min` : number(s)));

// Room for the longest of the texts beside a y axis, in pixels.
const yWidth = (plot, texts) => 12 + 6.2 * Math.max(3, ...(texts ?? []).map((text) => text.length));

// One drawn chart. `spec` has lines [{label, colour, dash, width}], unit, format, objectives, marks, range, clockTime, sync.
class Drawing {
  constructor(box, legend, spec, data) {
    this.spec = spec;
    this.legend = legend;
    this.tip = document.createElement("div");
    this.tip.className = "chart-tip";
    this.tip.hidden = true;
    this.plot = new uPlot(this.#options(box), data, box);
    this.plot.over.append(this.tip);
    this.#write(null);
  }

  #options(box) {
    const spec = this.spec;
    const y = (plot, low, high) => spec.range?.(low, high) ?? this.#range(high);
    return {
      width: Math.max(120, box.clientWidth), height: spec.height, legend: { show: false }, padding: [10, 16, 0, 0],
      cursor: { drag: { x: false, y: false }, y: false, points: { size: 5 }, sync: spec.sync ? { key: spec.sync } : undefined },
      scales: { x: { time: spec.clockTime, range: (plot, low, high) => spec.span?.() ?? [low, high] }, y: { range: y } },
      axes: [
        axis({ values: spec.clockTime ? clockTicks : spanTicks, space: 50, size: 24, gap: 9, incrs: spec.clockTime ? CLOCK_STEPS : undefined, label: spec.clockTime ? "local time" : "s since start" }),
        axis({ values: (plot, splits) => splits.map((v) => spec.format(v)), size: yWidth, space: 28, incrs: spec.whole ? WHOLE_STEPS : undefined, label: spec.unit }),
      ],
      series: [{}, ...spec.lines.map((line) => ({
        label: line.label, stroke: colour(line.colour), width: line.width ?? 1.75, dash: line.dash, points: { show: false }, spanGaps: false,
      }))],
      hooks: {
        drawClear: [(plot) => this.#marks(plot)],
        draw: [(plot) => this.#objectives(plot)],
        setCursor: [(plot) => this.#hover(plot)],
      },
    };
  }

  #range(high) {
    let top = known(high) && high > 0 ? high : 0;
    for (const { value } of this.spec.objectives()) {
      if (known(value) && (top === 0 || value <= FAR * top)) top = Math.max(top, value);
    }
    return [0, top > 0 ? top * 1.12 : 1];
  }

  #marks(plot) {
    const { ctx } = plot, { left, top, width, height } = plot.bbox, ratio = devicePixelRatio;
    const { min, max } = plot.scales.x;
    ctx.save();
    for (const mark of this.spec.marks()) {
      if (!(mark.at >= min && mark.at <= max)) continue;
      const x = Math.round(left + ((mark.at - min) / (max - min)) * width);
      ctx.strokeStyle = ctx.fillStyle = colour(LEVEL_COLOURS[mark.level] ?? "--mark");
      ctx.lineWidth = ratio;
      ctx.setLineDash([2 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(x, top);
      ctx.lineTo(x, top + height);
      ctx.stroke();
      ctx.beginPath();
      ctx.moveTo(x - 4 * ratio, top - 7 * ratio);
      ctx.lineTo(x + 4 * ratio, top - 7 * ratio);
      ctx.lineTo(x, top - ratio);
      ctx.fill();
    }
    ctx.restore();
  }

  #objectives(plot) {
    const { ctx } = plot, { left, top, width } = plot.bbox, ratio = devicePixelRatio;
    ctx.save();
    ctx.font = `${10 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "right";
    let beyond = 0;
    // the text stands out against lines that it crosses
    const write = (text, x, y) => {
      ctx.setLineDash([]);
      ctx.lineWidth = 3 * ratio;
      ctx.strokeStyle = colour("--panel");
      ctx.strokeText(text, x, y);
      ctx.fillText(text, x, y);
    };
    for (const { value, label, colour: name } of this.spec.objectives()) {
      if (!known(value)) continue;
      ctx.strokeStyle = ctx.fillStyle = colour(name);
      if (value > plot.scales.y.max) {
        ctx.textBaseline = "top";
        write(`↑ ${label}`, left + width - 2 * ratio, top + (2 + 12 * beyond) * ratio);
        beyond += 1;
        continue;
      }
      const y = Math.round(plot.valToPos(value, "y", true));
      ctx.setLineDash([1.5 * ratio, 3 * ratio]);
      ctx.lineWidth = ratio;
      ctx.beginPath();
      ctx.moveTo(left, y);
      ctx.lineTo(left + width, y);
      ctx.stroke();
      ctx.textBaseline = y - top > 14 * ratio ? "bottom" : "top";
      write(label, left + width - 2 * ratio, y + (ctx.textBaseline === "top" ? 2 : -1) * ratio);
    }
    ctx.restore();
  }

  #hover(plot) {
    const { left, idx } = plot.cursor;
    const over = left >= 0 && idx !== null && idx !== undefined;
    this.#write(over ? idx : null);
    if (!over) {
      this.tip.hidden = true;
      return;
    }
    const { min, max } = plot.scales.x, wide = plot.over.clientWidth;
    const near = this.spec.marks().filter((mark) => Math.abs(((mark.at - min) / (max - min)) * wide - left) <= NEAR_PX).slice(-5);
    this.tip.hidden = near.length === 0;
    if (near.length) {
      const time = (at) => (this.spec.clockTime ? clock(at) : seconds(at));
      this.tip.textContent = near.map((mark) => `${time(mark.at)}  ${mark.text}`).join("\n");
      this.tip.classList.toggle("left", left > wide / 2);
      this.tip.style.left = left > wide / 2 ? "auto" : `${left + 8}px`;
      this.tip.style.right = left > wide / 2 ? `${wide - left + 8}px` : "auto";
    }
  }

  // Writes the values at the pointer into the legend, or the latest ones.
  #write(idx) {
    const data = this.plot?.data;
    if (!data) return;
    const at = idx ?? data[0].length - 1;
    for (const cell of this.legend.querySelectorAll("[data-line]")) {
      const value = data[Number(cell.dataset.line) + 1]?.[at];
      const text = this.spec.legendFormat(value);
      if (cell.textContent !== text) cell.textContent = text;
    }
    this.legend.classList.toggle("hovering", idx !== null);
  }

  set(data) {
    this.plot.setData(data);
    const { left, idx } = this.plot.cursor;
    this.#write(left >= 0 && idx !== null ? idx : null);
  }

  size(width) {
    if (width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: this.spec.height });
  }

  destroy() {
    this.plot.destroy();
  }
}

// `groups` is a list of {label, colour, lines: [{name, dash, width}]}; the values of a group stand together in the legend.
function Chart({ title, unit, note, groups, whole, format = number, legendFormat, objectives = [], range, height = innerWidth >= WIDE ? 196 : 150, read, marks, span, clockTime, sync, watch, empty }) {
  const box = useRef(null), legend = useRef(null), drawing = useRef(null), latest = useRef({});
  latest.current = { read, marks, objectives, span };
  const lines = groups.flatMap((group) => group.lines.map((line) => ({ ...line, label: group.label, colour: line.colour ?? group.colour })));
  const shape = JSON.stringify([lines, unit, height, clockTime]);

  useLayoutEffect(() => {
    const spec = {
      lines, unit, format, legendFormat: legendFormat ?? format, range, height, whole, clockTime, sync,
      objectives: () => latest.current.objectives, marks: () => latest.current.marks(), span: () => latest.current.span?.(),
    };
    const make = () => {
      drawing.current?.destroy();
      drawing.current = new Drawing(box.current, legend.current, spec, latest.current.read());
    };
    make();
    const offTheme = onTheme(make);
    const sizes = new ResizeObserver(([entry]) => drawing.current.size(Math.floor(entry.contentRect.width)));
    sizes.observe(box.current);
    return () => {
      offTheme();
      sizes.disconnect();
      drawing.current.destroy();
      drawing.current = null;
    };
  }, [shape]);
  useEffect(() => watch?.(() => drawing.current?.set(latest.current.read())), [shape]);
  useEffect(() => {
    if (!watch) drawing.current?.set(read());
  });

  let at = -1;
  return html`<section class="panel chart" aria-label=${`${title}, ${unit}`}>
    <header class="panel-head"><h2>${title} <span class="unit">${unit}</span></h2>${note && html`<span class="note">${note}</span>`}</header>
    <ul class="legend" ref=${legend}>${groups.map((group) => html`<li key=${group.label}>
      <span class="swatch" style=${{ color: `var(${group.colour})` }} aria-hidden="true">
        ${group.lines.map((line) => html`<svg viewBox="0 0 16 6"><path d="M0 3h16" stroke="currentColor" stroke-width=${line.width ?? 2} stroke-dasharray=${line.dash ? "4 2.5" : "none"} /></svg>`)}
      </span>
      <span class="legend-name">${group.label}</span>
      ${group.lines.map((line, n) => {
        at += 1;
        return html`${n > 0 && html`<span class="slash">/</span>`}<span class="value" data-line=${at}></span>`;
      })}
    </li>`)}</ul>
    ${groups.length === 0 && html`<p class="empty">${empty ?? "There is nothing to show yet."}</p>`}
    <div class="plot" ref=${box}></div>
  </section>`;
}

// The marks of the feed's events. Each chart asks for them at each drawing, so that events stand in all charts alike.
const eventMarks = () => feed.events;

// A chart of the feed's series over the last `window_s` seconds.
export function LiveChart({ window_s, groups, ...rest }) {
  const names = groups.flatMap((group) => group.lines.map((line) => line.name));
  return html`<${Chart} ...${rest} groups=${groups} clockTime=${true} sync="live" marks=${eventMarks} watch=${onUpdate}
    read=${() => feed.window(names, window_s)} span=${() => [(feed.at ?? 0) - window_s, feed.at ?? 0]} />`;
}

// A chart by time since a start. `runs` is a list of {label, colour, t, values}; `actions` a list of {at_s, what}.
export function RunChart({ runs, actions = [], until_s, ...rest }) {
  const groups = runs.map(({ label, colour: name, dash }, n) => ({ label, colour: name, lines: [{ name: String(n), dash }] }));
  const read = () => {
    const tables = runs.map((run) => [run.t, run.values ?? run.t.map(() => null)]);
    return tables.length ? (tables.length === 1 ? tables[0] : uPlot.join(tables)) : [[]];
  };
  const marks = () => actions.map((action) => ({ at: action.at_s, text: action.what, level: action.level ?? "info" }));
  return html`<${Chart} ...${rest} groups=${groups} clockTime=${false} sync="run" read=${read} marks=${marks}
    span=${until_s ? () => [0, until_s] : undefined} />`;
}
