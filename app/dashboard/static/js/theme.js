// Light, dark, or as the system says. The choice is kept in this browser; charts draw again when it changes.

const KEY = "sluice-theme";
export const CHOICES = ["system", "light", "dark"];

const listeners = new Set();
const dark = matchMedia("(prefers-color-scheme: dark)");

export function themeChoice() {
  try {
    const kept = localStorage.getItem(KEY);
    return CHOICES.includes(kept) ? kept : "system";
  } catch {
    return "system"; // a browser that keeps nothing
  }
}

export function setTheme(choice) {
  try {
    localStorage.setItem(KEY, choice);
  } catch {
    // the choice then lasts as long as the page
  }
  apply(choice);
}

function apply(choice) {
  if (choice === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = choice;
  resolved.clear();
  for (const listener of listeners) listener();
}

export function onTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

const resolved = new Map();
let probe = null;

// The present value of a colour of app.css, such as "--text", in the form that a canvas takes.
export function colour(name) {
  if (!resolved.has(name)) {
    if (!probe) {
      probe = document.createElement("span");
      probe.hidden = true;
      document.body.append(probe);
    }
    probe.style.color = `var(${name})`;
    resolved.set(name, getComputedStyle(probe).color);
  }
  return resolved.get(name);
}

apply(themeChoice());
dark.addEventListener("change", () => apply(themeChoice()));
