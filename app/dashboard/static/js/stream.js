// The one stream of server-sent events. It resumes after a break from the last event that it has, and never gives up.
//
// `fetch` is used and not EventSource, because EventSource hides the status: an expired session would look like a break.

const RETRY_MS = [500, 1000, 2000, 4000, 8000];
const SILENT_MS = 25000; // the server sends a comment every 10 s at least

// Takes text as it comes and calls `event(name, id, data)` for each complete event.
export function parser(event) {
  let name = "message", id = null, data = [];
  const take = (line) => {
    if (line === "") {
      if (data.length) event(name, id, data.join("\n"));
      name = "message";
      data = [];
      return;
    }
    const colon = line.indexOf(":");
    if (colon === 0) return;
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(line[colon + 1] === " " ? colon + 2 : colon + 1);
    if (field === "data") data.push(value);
    else if (field === "event") name = value;
    else if (field === "id") id = value;
  };
  let begun = []; // the pieces of a line whose end has not come; a line of many engines comes in many
  return (text) => {
    let from = 0, end;
    while ((end = text.indexOf("\n", from)) >= 0) {
      begun.push(text.slice(from, end));
      const line = begun.length === 1 ? begun[0] : begun.join("");
      begun = [];
      from = end + 1;
      take(line.endsWith("\r") ? line.slice(0, -1) : line);
    }
    if (from < text.length) begun.push(text.slice(from));
  };
}

// Reads /api/stream until the returned function is called. `handlers` has message(name, value), up(), down(reason), lost().
export function openStream(path, handlers) {
  let stopped = false, last = null, tries = 0, abort = null, timer = 0, silence = 0;

  const listen = () => {
    clearTimeout(silence);
    silence = setTimeout(() => abort?.abort(), SILENT_MS);
  };

  async function read() {
    abort = new AbortController();
    const headers = { accept: "text/event-stream" };
    if (last !== null) headers["last-event-id"] = last;
    listen();
    const answer = await fetch(path, { headers, signal: abort.signal, cache: "no-store", credentials: "same-origin" });
    if (answer.status === 401) {
      stopped = true;
      handlers.lost();
      return "the session has ended";
    }
    if (!answer.ok) return `the server answered with status ${answer.status}`;
    const feed = parser((name, id, data) => {
      if (handlers.message(name, JSON.parse(data)) === false) {
        last = null; // something was missed: the next connection begins with a snapshot
        abort.abort();
        return;
      }
      last = id ?? last;
      tries = 0;
    });
    handlers.up();
    const reader = answer.body.getReader(), decoder = new TextDecoder();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return "the server ended the stream";
      listen();
      feed(decoder.decode(value, { stream: true }));
    }
  }

  async function run() {
    let reason;
    try {
      reason = await read();
    } catch (error) {
      reason = error.name === "AbortError" ? "nothing came for a while" : "the connection broke";
    }
    clearTimeout(silence);
    if (stopped) return;
    handlers.down(reason);
    timer = setTimeout(run, RETRY_MS[Math.min(tries, RETRY_MS.length - 1)]);
    tries += 1;
  }

  run();
  return () => {
    stopped = true;
    clearTimeout(timer);
    clearTimeout(silence);
    abort?.abort();
  };
}
