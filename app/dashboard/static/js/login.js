// Sign in: a key becomes a session. The key is sent once and kept nowhere.

import { html, useState } from "./lib.js";
import { post } from "./api.js";
import { Message, useChange } from "./ui.js";

export function Login({ problem, onSignedIn }) {
  const [key, setKey] = useState("");
  const [busy, error, run] = useChange();
  const submit = async (event) => {
    event.preventDefault();
    if (!key.trim()) return;
    const answer = await run(() => post("/api/login", { key: key.trim() }));
    if (answer) {
      setKey("");
      onSignedIn();
    }
  };
  return html`<main class="login">
    <form class="panel" onSubmit=${submit}>
      <h1><img src="static/icon.svg" alt="" width="28" height="28" /> Sluice</h1>
      <p>Sign in with a key: a viewer key to watch, an admin key to change things, too.</p>
      <label class="field">Key <input type="password" name="key" autocomplete="current-password" value=${key} autofocus onInput=${(e) => setKey(e.target.value)} /></label>
      ${(error || problem) && html`<${Message} level="error">${error ?? problem}<//>`}
      <div class="buttons"><button type="submit" class="primary" disabled=${busy || !key.trim()}>${busy ? "Signing in…" : "Sign in"}</button></div>
      <p class="note">Keys are dashboard.viewer_keys and dashboard.admin_keys of the configuration. Where no admin key is given, the server makes one at its start, and its log names the file.</p>
    </form>
  </main>`;
}
