// What the page knows of the cluster: a snapshot, kept current by one delta a second. No DOM here.

const SEAM = 5; // deltas that may come once more around a snapshot
const KEPT = { events: 500, latest: 50 };
const COUNTING = new Intl.Collator("en", { numeric: true }).compare; // the order in which a person counts: 2 before 10

export class Feed {
  #sorted = { membership: -1, groups: [] };

  constructor() {
    this.membership = 0; // grows when engines come or go
    this.eventsVersion = 0;
    this.clear();
  }

  clear() {
    this.seq = null;
    this.at = null;
    this.keep = 900;
    this.period_s = 1;
    this.line = null;
    this.classes = [];
    this.slo = {};
    this.absent = {};
    this.series = { t: [] };
    this.engines = new Map();
    this.events = [];
    this.transfers = null;
    this.requests = { latest: [], worst: [] };
  }

  snapshot(value) {
    this.clear();
    Object.assign(this, {
      seq: value.seq, at: value.at, keep: value.keep ?? 900, period_s: value.period_s ?? 1, line: value.line,
      classes: value.classes ?? [], slo: value.slo ?? {}, absent: value.absent ?? {}, series: value.series,
      events: value.events ?? [], transfers: value.transfers ?? null,
      requests: value.requests ?? { latest: [], worst: [] },
    });
    this.engines = new Map(Object.entries(value.engines ?? {}));
    this.membership += 1;
    this.eventsVersion += 1;
  }

  // Returns false if deltas are missing between what is known and this one, or if the server has begun to count anew; nothing
  // is changed then. One that came before, as at the seam of a snapshot, is passed over.
  delta(value) {
    if (this.seq === null || value.seq > this.seq + 1 || value.seq < this.seq - SEAM) return false;
    if (value.seq <= this.seq) return true;
    this.seq = value.seq;
    this.at = value.at;
    if (value.line) this.line = value.line;
    for (const name of ["classes", "slo", "absent", "transfers"]) {
      if (value[name] !== undefined && value[name] !== null) this[name] = value[name];
    }
    if (value.series) this.#append(value.series);
    for (const [id, engine] of Object.entries(value.engines ?? {})) {
      if (engine === null ? this.engines.delete(id) : !this.engines.has(id)) this.membership += 1;
      if (engine !== null) this.engines.set(id, engine);
    }
    if (value.events?.length) {
      this.events = this.events.concat(value.events).slice(-KEPT.events);
      this.eventsVersion += 1;
    }
    if (value.requests?.latest?.length) {
      this.requests.latest = value.requests.latest.concat(this.requests.latest).slice(0, KEPT.latest);
    }
    if (value.requests?.worst) this.requests.worst = value.requests.worst;
    return true;
  }

  #append(point) {
    const series = this.series, length = series.t.length;
    for (const name of Object.keys(point)) {
      if (!(name in series)) series[name] = new Array(length).fill(null);
    }
    for (const name of Object.keys(series)) {
      series[name].push(point[name] ?? null);
      if (series[name].length > this.keep) series[name].shift();
    }
  }

  // The groups with the ids of their engines, both in the order that a person counts in; sorted only when engines come or go.
  groups() {
    if (this.#sorted.membership !== this.membership) {
      const groups = new Map();
      for (const [id, engine] of this.engines) {
        const name = engine.group ?? id;
        if (!groups.has(name)) groups.set(name, []);
        groups.get(name).push(id);
      }
      const found = [...groups].map(([name, ids]) => ({ name, ids: ids.sort(COUNTING) }));
      this.#sorted = { membership: this.membership, groups: found.sort((a, b) => COUNTING(a.name, b.name)) };
    }
    return this.#sorted.groups;
  }

  // The latest `window_s` seconds of these series, as uPlot takes them; a series that is not there is all null.
  window(names, window_s) {
    const t = this.series.t;
    const from = (t.at(-1) ?? 0) - window_s;
    let low = 0, high = t.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (t[middle] < from) low = middle + 1;
      else high = middle;
    }
    const times = t.slice(low);
    return [times, ...names.map((name) => this.series[name]?.slice(low) ?? times.map(() => null))];
  }

  last(name) {
    return this.series[name]?.at(-1) ?? null;
  }

  // Names of series below a prefix, such as the tiers of "bytes_per_s/tier/", in the order that a person counts in.
  below(prefix) {
    return Object.keys(this.series).filter((name) => name.startsWith(prefix)).sort(COUNTING);
  }
}

// The totals of some engines. Sums count engines that do not report as nothing; a mean or a most is over those that do.
export function totals(engines) {
  const sum = { engines: 0, running: 0, slots: 0, waiting: 0, leases: 0, kv: null, kvMost: null, states: {} };
  let kv = 0, kvKnown = 0;
  for (const engine of engines) {
    sum.engines += 1;
    sum.running += engine.running ?? 0;
    sum.slots += engine.slots ?? 0;
    sum.waiting += engine.waiting ?? 0;
    sum.leases += engine.leases ?? 0;
    if (typeof engine.kv_usage === "number") {
      kv += engine.kv_usage;
      kvKnown += 1;
      sum.kvMost = Math.max(sum.kvMost ?? 0, engine.kv_usage);
    }
    const state = stateOf(engine);
    sum.states[state] = (sum.states[state] ?? 0) + 1;
  }
  if (kvKnown) sum.kv = kv / kvKnown;
  return sum;
}

// One word for an engine: its state, or "warm" for one that is ready and gets no requests.
export const stateOf = (engine) => (engine.state === "ready" && engine.duty === "warm" ? "warm" : engine.state);
