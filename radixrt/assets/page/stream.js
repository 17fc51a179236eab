"use strict";
// Talks to the server: the key, single answers, and the stream of events, which is taken up again when it ends.

const KEY = "radixrt-key";
const SILENT_SECONDS = 15, HIDDEN_SECONDS = 60, MAX_WAIT_SECONDS = 30;

class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function get(path, signal) {
  const key = sessionStorage.getItem(KEY);
  const response = await fetch(path, { signal, cache: "no-store", headers: key ? { Authorization: `Bearer ${key}` } : {} });
  if (response.ok) return response;
  let message = "";
  try {
    message = (await response.json()).error.message;
  } catch {
    message = response.statusText;
  }
  throw new Refusal(response.status, message);
}

const getJSON = async (path, signal) => (await get(path, signal)).json();

// The events of an SSE stream as [name, data].
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      let name = "message", data = "";
      for (const line of block.split("\n"))
        if (line.startsWith("event:")) name = line.slice(6).trim();
        else if (line.startsWith("data:")) data += line.slice(5);
      if (data) yield [name, JSON.parse(data)];
    }
  }
}

const connection = { stop: null, wake: null };

// Follow /v1/live for ever. `told`: what to do with an event, and with each change of the connection.
async function follow(told) {
  let wait = 1;
  for (;;) {
    const why = await followOnce(told, () => (wait = 1));
    if (why === "hidden") {
      told.paused();
      await new Promise((resolve) => (connection.wake = resolve));
      continue;
    }
    if (why === "again") continue;
    const until = Date.now() + wait * (0.8 + 0.4 * Math.random()) * 1000;
    while (Date.now() < until && !(await nap(told, why, until)));
    wait = Math.min(wait * 2, MAX_WAIT_SECONDS);
  }
}

// Up to a second of waiting; whether the user would not wait.
async function nap(told, why, until) {
  told.away(why, Math.ceil((until - Date.now()) / 1000));
  return new Promise((resolve) => {
    connection.wake = () => resolve(true);
    setTimeout(() => resolve(false), Math.min(1000, until - Date.now()));
  });
}

// Follow until the stream ends; returns why it did, or "again" to take it up at once.
async function followOnce(told, good) {
  const stop = new AbortController();
  let reason = "", timer = 0;
  const end = (why) => ((reason = why), stop.abort());
  const heard = () => (clearTimeout(timer), (timer = setTimeout(end, SILENT_SECONDS * 1000, `The server has said nothing for ${SILENT_SECONDS} s.`)));
  connection.stop = end;
  heard();
  try {
    for await (const [name, data] of events(await get("/v1/live", stop.signal))) {
      heard();
      good();
      told[name]?.(data);
    }
    return "The server closed the connection.";
  } catch (problem) {
    if (reason) return reason;
    if (problem.status === 401) return await told.ask(problem.message);
    if (problem.status === 404) return "This server has no live data: it is older than this page, or something else answers here.";
    if (problem.status) return `The server answers: ${problem.message || problem.status}.`.replace("..", ".");
    if (problem instanceof SyntaxError) return "What the server sent cannot be read.";
    return "The server does not answer.";
  } finally {
    clearTimeout(timer);
    connection.stop = null;
  }
}

// Who does not look needs no data.
let hiding = 0;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiding);
  if (document.hidden) hiding = setTimeout(() => connection.stop?.("hidden"), HIDDEN_SECONDS * 1000);
  else connection.wake?.();
});
