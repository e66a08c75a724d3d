// Parameters as form fields: what type a value has, what a person typed means, and what a change changes. No DOM here.

import { short } from "./format.js";

// The type of a parameter by its default. A default of null and anything structured is written as JSON.
export function typeOf(value) {
  if (typeof value === "boolean") return "true or false";
  if (typeof value === "number") return "number";
  if (typeof value === "string") return "text";
  return "JSON";
}

// What a field shows for a value.
export const textOf = (value) => (typeof value === "string" ? value : JSON.stringify(value));

// The value of a typed text. Throws an Error that says what is wrong.
export function valueOf(text, type, name) {
  const trimmed = text.trim();
  if (type === "text") return trimmed;
  if (type === "true or false") return trimmed === "true";
  if (type === "number") {
    const value = Number(trimmed);
    if (trimmed === "" || !Number.isFinite(value)) throw new Error(`${name} must be a number, not ${short(text) || "empty"}.`);
    return value;
  }
  try {
    return JSON.parse(trimmed);
  } catch {
    throw new Error(`${name} must be JSON (a number, null, "text", [list] or {object}), not ${short(text) || "empty"}.`);
  }
}

export const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

// The leaves in which two JSON values differ: [path, before, after].
export function differences(before, after, path = "") {
  const open = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
  if (open(before) && open(after)) {
    const names = [...new Set([...Object.keys(before), ...Object.keys(after)])];
    return names.flatMap((name) => differences(before[name], after[name], path ? `${path}.${name}` : name));
  }
  return same(before, after) ? [] : [[path, before, after]];
}

// The value that a person means by VALUE in KEY = VALUE: JSON where it is JSON, else the text itself.
export function loose(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text.trim();
  }
}
