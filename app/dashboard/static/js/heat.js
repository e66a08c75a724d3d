// Canvas pictures of load: a strip of ten minutes for one engine, and a map with a cell for each engine.

import { html, useEffect, useRef } from "./lib.js";
import { colour, onTheme } from "./theme.js";
import { known } from "./format.js";

const STOPS = ["--heat0", "--heat1", "--heat2", "--heat3"];
const cache = { key: "", colours: [] };

// The colour of a share of 0..1, in 33 steps from calm to full.
export function heatColour(share) {
  const key = STOPS.map(colour).join();
  if (cache.key !== key) {
    const stops = STOPS.map((name) => colour(name).match(/[\d.]+/g).slice(0, 3).map(Number));
    cache.key = key;
    cache.colours = Array.from({ length: 33 }, (_, n) => {
      const place = (n / 32) * (stops.length - 1), low = Math.min(stops.length - 2, Math.floor(place)), part = place - low;
      return `rgb(${stops[low].map((v, c) => Math.round(v + (stops[low + 1][c] - v) * part)).join()})`;
    });
  }
  return cache.colours[Math.round(Math.max(0, Math.min(1, share)) * 32)];
}

// Prepares a canvas for its size on the screen and returns its context, in CSS pixels.
export function context(canvas, width, height) {
  const ratio = devicePixelRatio;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const ctx = canvas.getContext("2d");
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  ctx.clearRect(0, 0, width, height);
  return ctx;
}

const STRIP = { width: 240, row: 9, gap: 1 };

// Ten minutes of one engine: the upper row is the share of its slots, the lower one its KV.
export function HeatStrip({ heat, label }) {
  const canvas = useRef(null);
  useEffect(() => {
    const draw = () => {
      const ctx = context(canvas.current, STRIP.width, 2 * STRIP.row + STRIP.gap);
      for (const [row, values] of [heat?.running, heat?.kv].entries()) {
        const top = row * (STRIP.row + STRIP.gap), width = STRIP.width / (values?.length || 60);
        (values ?? []).forEach((share, at) => {
          if (!known(share)) return;
          ctx.fillStyle = heatColour(share);
          ctx.fillRect(at * width, top, Math.max(1, width - 0.5), STRIP.row);
        });
      }
    };
    draw();
    return onTheme(draw);
  }, [heat]);
  return html`<canvas class="strip" ref=${canvas} role="img" aria-label=${label}></canvas>`;
}

// The scale of the colours, for the legend of a map or a strip.
export function HeatScale({ low = "0 %", high = "100 %" }) {
  const canvas = useRef(null);
  useEffect(() => {
    const draw = () => {
      const ctx = context(canvas.current, 99, 8);
      for (let n = 0; n < 33; n += 1) {
        ctx.fillStyle = heatColour(n / 32);
        ctx.fillRect(n * 3, 0, 3, 8);
      }
    };
    draw();
    return onTheme(draw);
  }, []);
  return html`<span class="heat-scale"><span>${low}</span><canvas ref=${canvas} aria-hidden="true"></canvas><span>${high}</span></span>`;
}
