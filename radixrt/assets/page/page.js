"use strict";
// The page: what it does with events, the scheme of its colours, and its first steps.

const page = { state: null, live: false, drawn: 0 };
const DARK = matchMedia("(prefers-color-scheme: dark)");
const THEMES = ["auto", "dark", "light"];

const isDark = () => (document.documentElement.dataset.theme ?? (DARK.matches ? "dark" : "light")) === "dark";

function setTheme(theme) {
  localStorage.setItem("radixrt-theme", theme);
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  put($("theme"), `Theme: ${theme}`);
  set($("theme"), { "aria-label": `Theme: ${theme}` });
  repaint();
}

function repaint() {
  colours.clear();
  drawChart();
  drawTree();
  showTreeKey();
}

const told = {
  history({ points }) {
    chart.points = points;
  },
  state(state) {
    const first = !page.live;
    page.state = state;
    page.live = true;
    addPoint(state.point);
    if (first) arrived(state);
    cancelAnimationFrame(page.drawn);
    page.drawn = requestAnimationFrame(render);
  },
  away(why, seconds) {
    page.live = false;
    document.body.className = page.state ? "away" : "away unknown";
    put($("live").lastElementChild, "away");
    const since = page.state ? ` Shown is how it was at ${clock(page.state.time)}.` : "";
    say(`${why}${since} Trying again in ${seconds} s.`);
  },
  paused() {
    page.live = false;
    put($("live").lastElementChild, "paused");
  },
  ask,
};

// The countdown changes each second; only the reason is said aloud again.
function say(text) {
  const node = $("notice");
  node.setAttribute("aria-live", node.hidden ? "assertive" : "off");
  node.hidden = !text;
  put(node.firstElementChild, text);
}

function arrived(state) {
  if (state.uptime < 300 && !chart.points.some((point) => point[0] < state.time - 300)) document.querySelector("[data-minutes='5']").click();
  document.body.className = "on";
  say("");
  put($("live").lastElementChild, "live");
  $("forget").hidden = !sessionStorage.getItem(KEY);
  loadTree();
}

// Ask for a key; resolves once there is one to try.
function ask(message) {
  const dialog = $("ask"), tried = sessionStorage.getItem(KEY);
  put($("ask-wrong"), tried ? `The server refused this key: ${message}.` : "");
  put($("live").lastElementChild, "needs a key");
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.onclose = () => {
      if (!$("key").value) return dialog.showModal();
      sessionStorage.setItem(KEY, $("key").value.trim());
      $("key").value = "";
      resolve("again");
    };
  });
}

function render() {
  const state = page.state;
  if (!state) return;
  put($("version"), state.version);
  const whose = state.admin ? "all tenants" : state.tenant && `tenant ${state.tenant}`;
  $("whose").hidden = !whose;
  put($("whose"), whose);
  set($("whose"), { title: whose });
  document.title = state.totals.prompt_tokens ? `${percent(state.totals.hit_tokens, state.totals.prompt_tokens)} hit \u2013 radixrt` : "radixrt";
  showStart(state);
  drawChart();
  showTotals(state);
  showRequests(state);
  showTenants(state.tenants);
  showTalks(state.conversations);
  showBreaks(state.volatile);
  showTimes(state.latency);
  showWorkers(state.workers);
  showFailures(state.failures);
}

function showTotals(state) {
  const totals = state.totals, all = totals.prompt_tokens;
  const last = chartPoints(chart.points, 1).at(-1);
  const tiles = [
    ["Hit rate since the start", percent(totals.hit_tokens, all), `of ${percent(totals.bound_tokens, all)} possible`],
    ["Hit rate of the last 30 s", last?.prompt ? percent(last.hit, 1) : "\u2013", last?.prompt ? `of ${percent(last.bound, 1)} possible` : "no prompts"],
    ["Requests", count(totals.requests), `${state.requests.length} now`],
    ["Prompt tokens", short(all), `${short(totals.hit_tokens)} of them reused`],
    ["Generated tokens", short(totals.generated_tokens), totals.requests ? `${short(totals.generated_tokens / totals.requests)} a request` : ""],
    ["Up for", span(state.uptime), `since ${new Date((state.time - state.uptime) * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" })}`],
  ];
  keyed($("tiles"), tiles, (tile) => tile[0], () => el("div", {}, el("dt"), el("dd", {}, "", el("small"))), (node, [name, value, more]) => {
    put(node.firstChild, name);
    if (node.lastChild.firstChild.nodeType !== Node.TEXT_NODE) node.lastChild.prepend("");
    node.lastChild.firstChild.data = value;
    put(node.lastChild.lastChild, more);
  });
  set($("chart"), { "aria-label": `Hit rate over the last ${chart.minutes} minutes. ${tiles[1][0]}: ${tiles[1][1]} ${tiles[1][2]}` });
  $("whole").hidden = !all;
  if (!all) return;
  const found = parts({ hit: totals.hit_tokens, misses: totals.misses });
  bar($("whole-bar"), found, all, totals.bound_tokens);
  keyed($("whole-key"), found, (part) => part[0], (part) => el("li", { title: CAUSES[part[0]]?.[1] ?? "Their KV cache was reused" }, legend(part[0], part[2], ""), el("b")), (node, part) =>
    put(node.lastChild, `${percent(part[1], all)}  (${short(part[1])})`));
}

// What a newcomer does next: the command with this page's address and a model that is served.
let model = "";
function showStart(state) {
  const starting = state.workers.every((worker) => worker.state !== "serving");
  $("start").hidden = state.totals.requests > 0 || state.requests.length > 0;
  document.body.classList.toggle("fresh", !$("start").hidden);
  $("start-steps").hidden = starting;
  if ($("start").hidden) return;
  put($("start-title"), starting ? "The server is up, and waits for a worker" : "Ready. No request has come in yet");
  put($("start-why"), starting ? "Loading a large model takes minutes. This page changes by itself; if it does not, the log of radixrt serve says why." : "This page shows what is reused of each prompt, and why the rest is not.");
  const key = sessionStorage.getItem(KEY) ? " \\\n  -H 'Authorization: Bearer YOUR_KEY'" : "";
  const body = JSON.stringify({ model: model || "MODEL", messages: [{ role: "user", content: "Say hello." }] }).replaceAll("'", "\\u0027");
  put($("curl"), `curl ${location.origin}/v1/chat/completions${key} \\\n  -H 'Content-Type: application/json' \\\n  -d '${body}'`);
  put($("base"), `${location.origin}/v1`);
  if (!model && !starting) getJSON("/v1/models").then((found) => ((model = found.data[0]?.id ?? ""), render()), () => {});
}

function start() {
  setTheme(THEMES.includes(localStorage.getItem("radixrt-theme")) ? localStorage.getItem("radixrt-theme") : "auto");
  $("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(localStorage.getItem("radixrt-theme")) + 1) % 3]));
  DARK.addEventListener("change", repaint);
  $("forget").addEventListener("click", () => (sessionStorage.removeItem(KEY), location.reload()));
  $("notice").querySelector("button").addEventListener("click", () => connection.wake?.());
  $("copy").addEventListener("click", copy);
  $("talks-more").addEventListener("click", () => ((allTalks = !allTalks), render()));
  $("ask").addEventListener("cancel", (event) => event.preventDefault());
  startChart();
  startRequests();
  startTree();
  showNode();
  const resized = new ResizeObserver(() => (tree.zoom && !tree.moving && (tree.view = viewOf(tree.zoom)), drawChart(), drawTree()));
  for (const canvas of [$("chart"), $("icicle")]) resized.observe(canvas);
  follow(told);
}

// Browsers let pages copy on https and localhost only; elsewhere the command is selected.
async function copy() {
  try {
    await navigator.clipboard.writeText($("curl").textContent);
    put($("copy"), "Copied");
  } catch {
    getSelection().selectAllChildren($("curl"));
  }
}

start();
