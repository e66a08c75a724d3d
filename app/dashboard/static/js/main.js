// The page: who is signed in, the line of state, and the views, which the fragment of the address names.

import { html, render, useEffect, useState } from "./lib.js";
import { ApiError, get, post, useSession } from "./api.js";
import { startFeed } from "./live.js";
import { Login } from "./login.js";
import { StateLine } from "./state_line.js";
import { CHOICES, setTheme, themeChoice } from "./theme.js";
import { Message, Tabs } from "./ui.js";
import { Control } from "./views/control.js";
import { Engines } from "./views/engines.js";
import { Experiments } from "./views/experiments.js";
import { Overview } from "./views/overview.js";
import { Requests } from "./views/requests.js";
import { Transfers } from "./views/transfers.js";
import { WhatIf } from "./views/whatif.js";

const VIEWS = {
  overview: ["Overview", Overview], engines: ["Engines", Engines], transfers: ["Transfers", Transfers], requests: ["Requests", Requests],
  control: ["Control", Control], experiments: ["Experiments", Experiments], whatif: ["What if", WhatIf],
};

// The view that the address names, and what follows it: "#/requests/abc" is the request abc.
function place() {
  const [view, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  let text = rest.join("/");
  try {
    text = decodeURIComponent(text);
  } catch {
    // a stray % is part of the name
  }
  return { view: view in VIEWS ? view : "overview", rest: text };
}

function go(view, rest = "") {
  location.hash = `#/${view}${rest ? `/${rest.split("/").map(encodeURIComponent).join("/")}` : ""}`;
}

function App() {
  const [session, setSession] = useState(undefined); // undefined: not known yet; null: nobody is signed in
  const [problem, setProblem] = useState(null);
  const [at, setAt] = useState(place);

  const lost = (message) => {
    useSession(null);
    setSession(null);
    setProblem(typeof message === "string" ? message : null);
  };
  const signedIn = async () => {
    try {
      const found = await get("/api/session");
      useSession(found.csrf, () => lost("Your session has ended: sign in again."));
      setProblem(null);
      setSession(found);
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) lost(null);
      else setProblem(error.message);
    }
  };
  useEffect(() => {
    signedIn();
    const moved = () => setAt(place());
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  useEffect(() => (session ? startFeed(() => lost("Your session has ended: sign in again.")) : undefined), [session]);
  useEffect(() => {
    document.title = session ? `${VIEWS[at.view][0]} · Sluice` : "Sluice";
  }, [at.view, session]);

  if (session === undefined) {
    return html`<main class="login">${problem ? html`<${Message} level="error">${problem}<//><button type="button" onClick=${signedIn}>Try again</button>` : html`<p class="empty">Connecting…</p>`}</main>`;
  }
  if (session === null) return html`<${Login} problem=${problem} onSignedIn=${signedIn} />`;
  const signOut = async () => {
    await post("/api/logout").catch(() => {});
    lost(null);
  };
  const View = VIEWS[at.view][1];
  return html`<div class="shell">
    <header class="top">
      <div class="masthead">
        <a class="brand" href="#/overview"><img src="static/icon.svg" alt="" width="20" height="20" />Sluice</a>
        <${Tabs} className="nav" label="Views" tabs=${Object.entries(VIEWS).map(([id, [title]]) => [id, title])} at=${at.view} onChange=${(view) => go(view)} panel="view" />
        <span class="grow"></span>
        <span class="who" title=${session.version && `version ${session.version}`}>${session.model && html`<span class="mono model" title=${session.model}>${session.model}</span>`}<span class="badge">${session.role}</span></span>
        <${Theme} />
        <button type="button" onClick=${signOut}>Sign out</button>
      </div>
      <${StateLine} />
    </header>
    <main><div id="view" role="tabpanel" aria-labelledby=${`tab-${at.view}`} tabindex="-1"><h1 class="hidden">${VIEWS[at.view][0]}</h1><${View} key=${at.view} role=${session.role} rest=${at.rest} go=${go} experiments=${session.experiments} /></div></main>
  </div>`;
}

function Theme() {
  const [choice, set] = useState(themeChoice());
  const change = (event) => {
    set(event.target.value);
    setTheme(event.target.value);
  };
  return html`<label class="theme"><span class="hidden">Theme</span><select value=${choice} onChange=${change}>${CHOICES.map((one) => html`<option key=${one} value=${one}>${one === "system" ? "theme: system" : one}</option>`)}</select></label>`;
}

render(html`<${App} />`, document.getElementById("app"));
