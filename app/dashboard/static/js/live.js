// The feed as the views see it: one stream, one Feed, and hooks that draw a component again after each update.

import { useEffect, useState } from "./lib.js";
import { Feed } from "./feed.js";
import { openStream } from "./stream.js";

export const feed = new Feed();

const STALE_PERIODS = 3; // a delta that is this many periods late marks the page

export const link = { state: "connecting", reason: null, arrived_ms: null, stale: false };

const listeners = { update: new Set(), link: new Set() };
let scheduled = false;

// Calls the listeners once a frame, however many deltas came at once. A hidden page is not drawn until it is shown.
function updated() {
  if (scheduled || document.hidden) return;
  scheduled = true;
  requestAnimationFrame(() => {
    scheduled = false;
    for (const listener of listeners.update) listener();
  });
}

function linkChanged() {
  for (const listener of listeners.link) listener();
}

// Seconds since the latest data, or null before the first.
export const age_s = () => (link.arrived_ms === null ? null : (performance.now() - link.arrived_ms) / 1000);

// The server's time now, as far as this page can tell; null before the first data.
export const now = () => (feed.at === null ? null : feed.at + age_s());

export function startFeed(lost) {
  feed.clear();
  Object.assign(link, { state: "connecting", reason: null, arrived_ms: null, stale: false });
  const close = openStream("/api/stream", {
    message(name, value) {
      if (name === "snapshot") feed.snapshot(value);
      else if (name === "delta" && !feed.delta(value)) return false;
      link.arrived_ms = performance.now();
      if (link.stale || link.state !== "live") {
        link.stale = false;
        link.state = "live";
        linkChanged();
      }
      updated();
      return true;
    },
    up() {
      link.reason = null;
      linkChanged();
    },
    down(reason) {
      link.state = feed.seq === null ? "connecting" : "broken";
      link.reason = reason;
      linkChanged();
    },
    lost,
  });
  const watch = setInterval(() => {
    const age = age_s();
    const stale = age !== null && age > STALE_PERIODS * feed.period_s;
    if (stale || stale !== link.stale) {
      link.stale = stale;
      linkChanged();
    }
  }, 1000);
  document.addEventListener("visibilitychange", updated);
  return () => {
    close();
    clearInterval(watch);
    document.removeEventListener("visibilitychange", updated);
  };
}

function useListener(kind) {
  const [, draw] = useState(0);
  useEffect(() => {
    const listener = () => draw((n) => n + 1);
    listeners[kind].add(listener);
    return () => listeners[kind].delete(listener);
  }, [kind]);
}

// The feed; the component is drawn again after each update.
export function useFeed() {
  useListener("update");
  return feed;
}

// The state of the connection; the component is drawn again when it changes, and each second while data are stale.
export function useLink() {
  useListener("link");
  return link;
}

// Runs `listener` after each update without drawing the component.
export function onUpdate(listener) {
  listeners.update.add(listener);
  return () => listeners.update.delete(listener);
}

// The number of the latest event of one of these kinds, or null without one; the component is drawn again when it changes.
export function useLatestEvent(kinds) {
  const latest = () => feed.events.findLast((event) => kinds.includes(event.kind))?.seq ?? null;
  const [seq, set] = useState(latest);
  useEffect(() => {
    const look = () => set(latest());
    look();
    return onUpdate(look);
  }, [kinds.join()]);
  return seq;
}

// A text that says that there is nothing, or that nobody knows yet: before the first data nothing may be called absent.
export const orWaiting = (text) => (feed.seq === null ? "Waiting for the first data…" : text);
