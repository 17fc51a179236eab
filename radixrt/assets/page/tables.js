"use strict";
// Who occupies the cache, conversations, text that breaks caches, latency, workers and failures.

const TALKS = 6, TURNS = 20;
let allTalks = false;

const showTenants = table($("tenants"), [
  { name: "Tenant", kind: "first", label: false, text: (row) => row.tenant || "(no key)" },
  { name: "Cached tokens", kind: "n", text: (row) => count(row.cached_tokens) },
  { name: "Cache", kind: "wide barred", label: false, show: (cell, row) => bar(cell, [["hit", row.share, row.tenant]], 1, null, percent(row.share, 1)) },
  { name: "Share", kind: "n share", text: (row) => percent(row.share, 1) },
  { name: "Running", kind: "n", help: "Its requests that wait or run now", text: (row) => count(row.requests) },
], (row) => row.tenant);

const showWorkers = table($("fleet"), [
  { name: "Worker", kind: "first", label: false, text: (row) => row.name },
  { name: "State", kind: "state", label: false, help: "Set aside: it failed again and again, and gets no requests. Lost: it does not answer.", show: (cell, row) =>
    pill(cell, row.stalled_seconds > 5 ? `stalled ${span(row.stalled_seconds)}` : row.state, row.stalled_seconds > 5 ? "bad" : { serving: "good", starting: "busy", draining: "warn" }[row.state] ?? "bad") },
  { name: "Running", kind: "n", help: "Requests in its batch", text: (row) => count(row.running) },
  { name: "Waiting", kind: "n", help: "Requests in its queue", text: (row) => count(row.waiting) },
  { name: "Tokens", kind: "n", help: "Tokens of the requests placed on it", text: (row) => count(row.tokens) },
  { name: "KV cache on the device", kind: "wide barred", help: "Pages of its KV cache that are in use", show: (cell, row) => memory(cell, row.pages_used, row.pages_total, "hit", "pages") },
  { name: "In host memory", kind: "wide barred", help: "What was evicted from the device and is kept in host memory", show: (cell, row) => memory(cell, row.host_used, row.host_total, "elsewhere", "tokens") },
  { name: "Restarts", kind: "n", text: (row) => count(row.restarts) },
], (row) => row.name);

function memory(cell, used, total, colour, unit) {
  if (!total) return put(cell, used ? `${count(used)} ${unit}` : "\u2013");
  if (!cell.querySelector(".bar")) cell.replaceChildren(el("div", { class: "bar" }), el("small"));
  bar(cell.firstChild, [[colour, used, "used"]], total, null, `${percent(used, total)} used`);
  put(cell.lastChild, `${count(used)} of ${count(total)} ${unit}`);
}

// Times on a common scale, of logarithms: the line is p50 to p99, the dot p90.
function spread(cell, times, rows, kind) {
  if (!cell.firstChild) cell.append(el("div", { class: "spread", "aria-hidden": "true" }, el("i"), el("u")));
  const [line, dot] = cell.firstChild.children;
  const least = Math.min(...rows.map((row) => row[`${kind}_p50`] || 1)) / 1.2, most = Math.max(...rows.map((row) => row[`${kind}_p99`] || 0), least * 2);
  const at = (time) => (100 * Math.log(Math.max(time, least) / least)) / Math.log(most / least);
  line.style.left = `${at(times[0])}%`;
  line.style.width = `${at(times[2]) - at(times[0])}%`;
  dot.style.left = `${at(times[1])}%`;
}

const timed = (kind, name, help) => [
  ...["p50", "p90", "p99"].map((part) => ({ name: `${name} ${part}`, kind: "n", help, text: (row) => span(row[`${kind}_${part}`]) })),
  { name: "p50 to p99", kind: "spreads", label: false, show: (cell, row) => spread(cell, ["p50", "p90", "p99"].map((part) => row[`${kind}_${part}`] ?? 0), page.state.latency, kind) },
];
const showTimes = table($("times"), [
  { name: "Tenant", kind: "first", label: false, show: (cell, row) => {
    if (!cell.firstChild) cell.append(el("span"), el("small"));
    put(cell.firstChild, row.tenant || "(no key)");
    put(cell.lastChild, row.model);
  } },
  ...timed("first", "TTFT", "Time from the request to its first token"),
  ...timed("token", "TPOT", "Time for each token after the first"),
], (row) => `${row.tenant}\n${row.model}`);

function showTalks(talks) {
  $("talks-empty").hidden = talks.length > 0;
  $("talks-more").hidden = talks.length <= TALKS;
  put($("talks-more"), allTalks ? "Show fewer" : `Show all ${talks.length}`);
  const make = () => el("li", {}, el("div", {}, el("b"), el("small")), svg("svg", { viewBox: "0 0 200 34", preserveAspectRatio: "none", role: "img" }), el("div", { class: "n" }));
  keyed($("talks"), allTalks ? talks : talks.slice(0, TALKS), (talk) => talk.id, make, (node, talk) => {
    const [names, picture, rate] = node.children, turns = talk.turns.slice(-TURNS), last = turns.at(-1);
    const name = talk.program;
    put(names.firstChild, name || "conversation");
    put(names.lastChild, [talk.tenant, `${count(talk.count ?? turns.length)} turn${talk.count === 1 ? "" : "s"}`, ago(page.state.time - talk.last)].filter(Boolean).join(" \u00b7 "));
    set(names, { title: name });
    put(rate, last ? `${percent(last.hit, last.prompt)} of ${short(last.prompt)}` : "");
    const drawn = JSON.stringify(turns);
    if (picture.drawn !== drawn) drawTurns(picture, turns);
    picture.drawn = drawn;
  });
}

function drawTurns(picture, turns) {
  const most = Math.max(1, ...turns.map((turn) => turn.prompt)), wide = 200 / TURNS;
  picture.replaceChildren(...turns.flatMap(({ prompt, hit, bound }, i) => {
    const x = i * wide, part = (name, from, to) => svg("rect", { class: name, x, width: wide - 1.5, y: 34 - (33 * to) / most, height: (33 * (to - from)) / most });
    return [part("prompt", Math.max(hit, bound), prompt), part("lost", hit, Math.max(hit, bound)), part("reused", 0, hit), svg("rect", { class: "mark", x, width: wide - 1.5, y: 33.3 - (33 * bound) / most, height: 1.4 })];
  }));
  const last = turns.at(-1);
  set(picture, { "aria-label": last ? `${turns.length} turns; the last reused ${percent(last.hit, last.prompt)}, ${percent(last.bound, last.prompt)} possible` : "no turns" });
}

function showBreaks(rows) {
  $("breaks-empty").hidden = rows.length > 0;
  const make = () => el("li", {}, el("p"), el("pre"), el("p", { class: "advice" }));
  keyed($("breaks"), rows, (row) => `${row.before}\n${row.after}`, make, (node, row) => {
    const [what, pre, advice] = node.children;
    put(what, `${count(row.requests)} requests changed it; ${count(row.tokens)} prompt tokens were computed again.`);
    pre.hidden = row.before == null;
    const text = JSON.stringify([row.before, row.values, row.after]);
    if (pre.drawn !== text && !pre.hidden) pre.replaceChildren("\u2026", row.before, ...row.values.flatMap((value, i) => [i ? " | " : "", el("mark", {}, value)]), row.after, "\u2026");
    pre.drawn = text;
    put(advice, row.advice);
  });
}

function showFailures(rows) {
  $("failed").hidden = !rows.length;
  const make = () => el("li", {}, el("span"), el("span"), el("p"));
  keyed($("failures"), rows, (row) => `${row.time} ${row.worker} ${row.text}`, make, (node, row) => {
    put(node.children[0], clock(row.time));
    put(node.children[1], row.worker);
    put(node.children[2], row.text);
  });
}
