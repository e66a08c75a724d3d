// Numbers, times and sizes as text. A figure that nobody knows (null, undefined, NaN) is a dash, never a zero.

export const NONE = "–";

export const known = (value) => typeof value === "number" && Number.isFinite(value);

const plain = new Map();

function decimals(value, digits) {
  if (!plain.has(digits)) {
    plain.set(digits, new Intl.NumberFormat("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
  }
  return plain.get(digits).format(value);
}

// Three significant digits, with separators of thousands: 0.0123, 1.23, 12.3, 1,234.
export function number(value) {
  if (!known(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 100) return decimals(value, 0);
  if (size >= 10) return decimals(value, Number.isInteger(value) ? 0 : 1);
  if (size >= 1) return decimals(value, Number.isInteger(value) ? 0 : 2);
  if (size >= 0.001) return String(Number(value.toPrecision(3)));
  return value.toExponential(1);
}

export const count = (value) => (known(value) ? decimals(value, 0) : NONE);

export const rate = (value) => (known(value) ? decimals(value, Math.abs(value) < 10 ? 2 : Math.abs(value) < 100 ? 1 : 0) : NONE);

export const percent = (share, digits = 1) => (known(share) ? `${decimals(100 * share, share >= 1 ? 0 : digits)} %` : NONE);

// A time span with its unit: 850 µs, 12.3 ms, 1.23 s, 4 min 05 s.
export function seconds(value) {
  if (!known(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 0.001) return `${decimals(value * 1e6, 0)} µs`;
  if (size < 1) return `${number(value * 1e3)} ms`;
  if (size < 120) return `${number(value)} s`;
  const whole = Math.round(size);
  const hours = Math.floor(whole / 3600), minutes = Math.floor((whole % 3600) / 60);
  const tail = String(whole % 60).padStart(2, "0");
  return hours ? `${hours} h ${String(minutes).padStart(2, "0")} min` : `${minutes} min ${tail} s`;
}

const SIZES = ["B", "kB", "MB", "GB", "TB"];

export function bytes(value) {
  if (!known(value)) return NONE;
  let size = value, at = 0;
  while (Math.abs(size) >= 1000 && at < SIZES.length - 1) {
    size /= 1000;
    at += 1;
  }
  return `${number(size)} ${SIZES[at]}`;
}

export const bytesRate = (value) => (known(value) ? `${bytes(value)}/s` : NONE);

// The wall clock of this browser, for a Unix time in seconds.
export function clock(at, fraction = 0) {
  if (!known(at)) return NONE;
  const time = new Date(at * 1000);
  const two = (n) => String(n).padStart(2, "0");
  const text = `${two(time.getHours())}:${two(time.getMinutes())}:${two(time.getSeconds())}`;
  return fraction ? text + (at % 1).toFixed(fraction).slice(1) : text;
}

export function dateClock(at) {
  if (!known(at)) return NONE;
  const time = new Date(at * 1000);
  const two = (n) => String(n).padStart(2, "0");
  return `${time.getFullYear()}-${two(time.getMonth() + 1)}-${two(time.getDate())} ${clock(at)}`;
}

export const words = (name) => String(name).replaceAll("_", " ");

// Any value of the server's JSON on one line.
export function short(value, most = 60) {
  const text = typeof value === "string" ? value : JSON.stringify(value);
  if (text === undefined) return NONE;
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}
