// Calls to the dashboard's server. Every error has the server's own words, which the views show as text.

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const session = { csrf: null, lost: () => {} };

// Sets the token that changes carry, and what to do when the server no longer knows the session.
export function useSession(csrf, lost) {
  session.csrf = csrf;
  if (lost) session.lost = lost;
}

async function call(method, path, body) {
  const headers = { accept: "application/json" };
  if (body !== undefined) headers["content-type"] = "application/json";
  if (method !== "GET" && session.csrf) headers["x-csrf-token"] = session.csrf;
  let answer;
  try {
    answer = await fetch(path, {
      method, headers, credentials: "same-origin", cache: "no-store",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch {
    throw new ApiError(0, "The dashboard does not answer. Is its process running?");
  }
  const text = await answer.text();
  let value = null;
  try {
    value = text ? JSON.parse(text) : null;
  } catch {
    // an answer that is no JSON has no message of its own
  }
  if (answer.ok) return value;
  if (answer.status === 401 && path !== "/api/login") session.lost();
  throw new ApiError(answer.status, value?.message ?? `${method} ${path} was answered with status ${answer.status}.`);
}

export const get = (path) => call("GET", path);
export const post = (path, body = {}) => call("POST", path, body);
export const put = (path, body = {}) => call("PUT", path, body);
export const remove = (path) => call("DELETE", path);
