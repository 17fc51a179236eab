"use strict";
// Requests, and why one missed.

// Causes of misses, by their names in the report: what the page calls them, and what they mean.
const CAUSES = {
  elsewhere: ["on another worker", "Another worker had these tokens, but the request was placed on this one, as the other was busy or did not serve. Fewer, larger workers share more."],
  evicted: ["evicted, or not ready", "Seen before, but no worker had it: evicted, or still being computed by another request. More memory keeps more: --gpu-memory-utilization, --kv-offloading-size."],
  page_rounding: ["page rounding", "Only whole pages are reused, and the shared prefix ends within one. Smaller pages (--page-size) lose less."],
  never_seen: ["new text", "No earlier prompt began the same way up to here, so no cache could have it. If it is much: does something near the start of prompts change with each request?"],
  logits: ["last token", "Computed in any case: the last token of a prompt gives the first token of the answer."],
};
const ROOM_SECONDS = 30;
const SHOWN = innerWidth <= 900 ? 5 : 8;
const requests = { lost: false, all: false, recent: [], open: null, asked: null };

// Parts of a bar: what was hit, then the misses by cause; while a request runs, what it may still hit is not known.
function parts(row) {
  const found = [["hit", row.hit, "reused"]];
  if (row.misses) for (const cause of Object.keys(CAUSES)) found.push([cause, row.misses[cause], CAUSES[cause][0]]);
  return found;
}

const lostTokens = (row) => (row.misses?.elsewhere ?? 0) + (row.misses?.evicted ?? 0);
const nameOf = (row) => row.program || row.tenant || "request";
const under = (row) => [row.program && row.tenant, row.model].filter(Boolean).join(" \u00b7 ");
const STATES = { waiting: "warn", prefill: "busy", decode: "busy", stop: "good", length: "good", tool_calls: "good", cancelled: "warn", error: "bad" };

function pill(cell, text, kind) {
  const node = cell.firstElementChild ?? cell.appendChild(el("span"));
  set(node, { class: `pill ${kind ?? ""}` });
  put(node, text);
}

const COLUMNS = [
  { name: "Program", kind: "who", label: false, help: "The program or agent that sent it; below, its tenant and the model", show: (cell, row) => {
    if (!cell.firstChild) cell.append(el("button", { type: "button", onclick: () => openRequest(cell.parentNode.row.id) }), el("small"));
    put(cell.firstChild, nameOf(row));
    put(cell.lastChild, under(row));
    set(cell, { title: `${nameOf(row)}\n${under(row)}` });
  } },
  { name: "Worker", kind: "worker", label: false, help: "Which worker computes it", text: (row) => row.worker || "\u2013" },
  { name: "Prompt", kind: "n", help: "Prompt tokens", text: (row) => count(row.prompt) },
  { name: "Reused and computed", kind: "wide barred", label: false, help: "Reused tokens, then computed ones by cause; the mark is what was possible", show: (cell, row) =>
    bar(cell, parts(row), row.prompt || 1, row.bound, `${percent(row.hit, row.prompt)} of ${count(row.prompt)} reused, ${percent(row.bound, row.prompt)} possible`) },
  { name: "Hit", kind: "n share", help: "Share of the prompt that was reused; predicted until the worker has begun", text: (row) => percent(row.hit, row.prompt) },
];
const AFTER = [
  { name: "Output", kind: "n", help: "Generated tokens", text: (row) => count(row.generated) },
  { name: "TTFT", kind: "n", help: "Time to first token", text: (row) => span(row.first) },
  { name: "Time", kind: "n", help: "Since it came in", text: (row) => span(row.seconds) },
];
const NOW = [...COLUMNS, ...AFTER, { name: "State", kind: "state", label: false, help: "Waiting for a worker, computing its prompt, or generating", show: (cell, row) => pill(cell, row.state, STATES[row.state]) }];
const RECENT = [...COLUMNS, ...AFTER.slice(1),
  { name: "End", kind: "state", label: false, help: "Why it ended", show: (cell, row) => pill(cell, row.end, STATES[row.end] ?? "bad") },
  { name: "Why it missed", kind: "why", label: false, show: (cell, row) => (put(cell, row.why), set(cell, { title: row.why })) }];

const opens = { made: (line) => line.addEventListener("click", (event) => event.target.closest("button") || openRequest(line.row.id)) };
const showNow = table($("now"), NOW, (row) => row.id, opens);
const showRecent = table($("recent"), RECENT, (row) => row.id, opens);

function showRequests(state) {
  requests.now = state.requests;
  requests.recent = state.recent;
  const running = state.requests.filter((row) => row.state !== "waiting").length;
  put($("now-title"), state.requests.length ? `Now: ${running} running, ${state.requests.length - running} waiting` : "Now");
  showNow(state.requests.slice(0, requests.all ? 100 : SHOWN));
  keepRoom();
  const wanted = state.recent.filter((row) => !requests.lost || lostTokens(row) > 0);
  const held = $("recent").matches(":has(tbody:hover, tbody :focus-visible)"); // rows must not flee from who points at them
  put($("recent-title"), held ? "Finished (held while you are in it)" : "Finished");
  if (!held) showRecent(requests.all ? wanted : wanted.slice(0, SHOWN));
  put($("recent-empty"), requests.lost && state.recent.length ? "None of the last requests lost what was possible." : "Finished requests are listed here.");
  $("recent-more").hidden = Math.max(wanted.length, state.requests.length) <= SHOWN;
  put($("recent-more"), requests.all ? "Show fewer" : `Show all ${state.requests.length + wanted.length}`);
  if (requests.open && state.recent.some((row) => row.id === requests.open) && requests.asked !== "ended") loadRequest("ended");
}

// What is below must not move with every request that comes or goes: room is given back when it was not used for a while.
const room = { height: 0, until: 0 };
function keepRoom() {
  const height = $("now").offsetHeight + $("now-empty").offsetHeight, now = Date.now();
  if (height >= room.height || now > room.until) Object.assign(room, { height, until: now + 1000 * ROOM_SECONDS });
  $("now-room").style.minHeight = `${room.height}px`;
}

function startRequests() {
  const key = [["hit", "reused", "The KV cache of these tokens was reused"], ...Object.entries(CAUSES).map(([name, words]) => [name, ...words])];
  $("causes").append(...key.map(([name, text, help]) => legend(name, text, help)), el("span", { title: "What a cache that never forgets would have reused" }, el("i", { class: "bound" }), "possible"));
  $("meanings").append(...key.slice(1).flatMap(([, text, help]) => [el("dt", {}, text), el("dd", {}, help)]));
  const buttons = [$("all-requests"), $("lost-requests")];
  choose(buttons, (button) => ((requests.lost = button === buttons[1]), render()));
  $("recent-more").addEventListener("click", () => ((requests.all = !requests.all), render()));
  const panel = $("panel");
  panel.addEventListener("click", (event) => (event.target === panel || event.target.closest("[data-close]")) && panel.close());
  panel.addEventListener("close", () => (requests.open = null));
}

function legend(name, text, help, value = "") {
  const square = el("i");
  square.style.setProperty("--c", `var(--${name})`);
  return el("span", { title: help }, square, text, ...(value ? [el("b", {}, value)] : []));
}

function openRequest(id) {
  requests.open = id;
  const row = [...requests.now, ...requests.recent].find((row) => row.id === id);
  put($("panel-title"), row ? nameOf(row) : "Request");
  $("panel-body").replaceChildren(el("p", { class: "soft" }, "Asking the server\u2026"));
  if (!$("panel").open) $("panel").showModal();
  loadRequest(row?.end ? "ended" : "running");
}

async function loadRequest(asked) {
  const id = requests.open;
  requests.asked = asked;
  let shown;
  try {
    shown = whyMissed(await getJSON(`/v1/live/requests/${encodeURIComponent(id)}`));
  } catch (problem) {
    const runs = requests.now.some((row) => row.id === id);
    const text = runs ? "It still runs. Why it missed is shown once it has ended." : problem.status === 404 ? "The server no longer remembers this request: it keeps the latest only." : `The server cannot say: ${problem.message}`;
    shown = [el("p", {}, text)];
  }
  if (requests.open === id) $("panel-body").replaceChildren(...shown);
}

// The panel's content: sentences, the prompt as a bar, then where it diverged, what evicted it, who else had it.
function whyMissed(why) {
  const row = [...requests.now, ...requests.recent].find((row) => row.id === why.id);
  const line = el("div", { class: "bar tall" }), key = el("div", { class: "key" });
  bar(line, parts(why), why.prompt || 1, why.bound);
  for (const [name, tokens, text] of parts(why)) if (tokens) key.append(legend(name, text, CAUSES[name]?.[1] ?? "", `${count(tokens)} (${percent(tokens, why.prompt)})`));
  const facts = [["Prompt", `${count(why.prompt)} tokens`], ["Reused", `${count(why.hit)} (${percent(why.hit, why.prompt)})`], ["Possible", `${count(why.bound)} (${percent(why.bound, why.prompt)})`], ["Computed on", why.worker || "no worker yet"]];
  if (row) facts.push(["Tenant", row.tenant || "\u2013"], ["Model", row.model], ["Time to first token", span(row.first)], ["Generated", `${count(row.generated)} tokens`]);
  facts.push(["Id", why.id]);
  const said = why.sentences.length ? why.sentences : ["Nothing was missed that could have been reused."];
  return [el("div", { class: "said" }, ...said.map((text) => el("p", {}, text))), line, key, ...diverged(why.diverged), ...lost(why), pairs(facts)];
}

function pairs(facts) {
  const list = el("dl", { class: "facts" });
  for (const [name, value] of facts) list.append(el("dt", {}, name), el("dd", {}, value));
  return list;
}

function diverged(at) {
  if (!at) return [];
  const where = at.message == null ? "" : `, in message ${at.message}${at.role ? ` (${at.role})` : ""}`;
  const side = (kind, title, text) => [el("h4", {}, title), el("pre", { class: kind }, at.before ? `\u2026${at.before}` : "", text == null ? el("span", { class: "soft" }, "(not shown: these requests have a cache_salt)") : el("mark", {}, text || "(ends here)"), at.after ? `${at.after}\u2026` : "")];
  return [el("div", { class: "split" }, el("h3", {}, `It diverges at token ${count(at.token)}${where}`), ...side("ours", "This prompt", at.ours), ...side("theirs", "The nearest prompt in the cache", at.theirs))];
}

function lost(why) {
  const found = [];
  if (why.evicted) {
    const when = why.evicted.seconds_ago == null ? "" : ` ${span(why.evicted.seconds_ago)} ago`;
    found.push(["Evicted", `${count(why.evicted.tokens)} tokens${when}${why.evicted.by ? `, to make room for ${why.evicted.by}` : ""}`]);
  }
  if (why.elsewhere) found.push(["Elsewhere", `${count(why.elsewhere.tokens)} tokens on ${why.elsewhere.worker}`]);
  return found.length ? [pairs(found)] : [];
}
