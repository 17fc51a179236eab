"use strict";
// The cache as an icicle on a canvas: zoom, keys, the path, and the chosen node.

const TREE_SECONDS = 5, ZOOM_MS = 260, MOST_NODES = 2000, MIN_ROW = 7, MAX_ROW = 44;
// top: the whole cache; data: what is drawn, which may be a finer answer below a node; zoom: the node at the top.
const tree = { top: null, data: null, zoom: null, chosen: null, over: null, mode: "use", view: null, moving: 0, visible: false, texts: new Map(), asking: null, path: [] };

async function loadTree(root = null) {
  tree.asking?.abort();
  const asking = (tree.asking = new AbortController());
  const query = root == null ? "" : `&root=${encodeURIComponent(root)}`;
  try {
    const answer = await getJSON(`/v1/live/tree?most=${MOST_NODES}${query}`, asking.signal);
    if (tree.asking === asking) takeTree(layOut(answer), root);
  } catch (problem) {
    if (root != null && problem.status === 404) showAll(); // evicted meanwhile
    else if (!tree.data && !asking.signal.aborted) showTreeParts(false, `The server does not send the tree: ${problem.message}.`);
  } finally {
    if (tree.asking === asking) tree.asking = null;
  }
}

function takeTree(data, root) {
  if (tree.moving) return setTimeout(takeTree, ZOOM_MS, data, root);
  const now = (node) => (!node || data.known.has(node.id) ? data.known.get(node?.id) : now(node.up)); // or what is left of it
  if (root == null) tree.top = data;
  tree.data = data;
  tree.zoom = now(tree.zoom) ?? data.root;
  tree.chosen = now(tree.chosen) ?? tree.zoom;
  tree.over = null;
  showTreeParts(data.root.subtree > 0, "Nothing is cached yet. Prompts appear here once they are computed.");
  tree.view = viewOf(tree.zoom);
  showPath();
  showNode();
  showTreeKey();
  drawTree();
}

function showTreeParts(shown, why) {
  for (const part of ["icicle", "tree-key", "tree-keys", "node", "path"]) $(part).hidden = !shown;
  $("tree-empty").hidden = shown;
  put($("tree-empty"), why);
}

const viewOf = (node) => ({ x0: node.x0, x1: Math.max(node.x1, node.x0 + 1), level: node.level, rows: Math.min(node.below + 1, Math.floor($("icicle").clientHeight / MIN_ROW)) });

function drawTree() {
  const { pen, width, height } = context($("icicle"));
  const { data, view } = tree;
  if (!data) return;
  const row = rowHeight(view, height), scale = width / (view.x1 - view.x0);
  const paint = painter(tree.mode, isDark(), workerNames());
  const labels = row >= 14;
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  for (let level = Math.max(0, Math.floor(view.level)); level < data.levels.length; level++) {
    const y = (level - view.level) * row;
    if (y >= height) break;
    for (const node of data.levels[level]) {
      const from = Math.max(0, (node.x0 - view.x0) * scale), to = Math.min(width, (node.x1 - view.x0) * scale);
      if (to <= 0 || from >= width) continue;
      const wide = Math.max(to - from - (to - from > 3 ? 1 : 0), 0.5);
      pen.fillStyle = paint(node);
      pen.fillRect(from, y, wide, row - 1);
      if (labels && wide > 44) {
        pen.fillStyle = inkOn(pen.fillStyle);
        pen.fillText(cellText(node, wide), from + 6, y + row / 2);
      }
      if (node.more && node.shown < node.x1) leftOut(pen, node, view, scale, y + row, row, width);
    }
  }
  for (const [node, thick] of [[tree.over, 1], [tree.chosen, 2]]) if (node) outline(pen, node, thick, view, scale, row, width);
}

const rowHeight = (view, height) => Math.min(MAX_ROW, Math.max(MIN_ROW, height / view.rows));

function cellText(node, wide) {
  const name = node.up ? "" : "all: ";
  const text = tree.texts.get(node.id);
  if (text && wide > 160) return `${short(node.tokens)} \u00b7 ${text.slice(0, Math.floor((wide - 60) / 7))}`;
  return name + (node.up ? short(node.tokens) : short(node.subtree)) + (wide > 100 ? (node.tokens === 1 && node.up ? " token" : " tokens") : "");
}

// Branches too small to be sent: hatched, as wide as they are together.
function leftOut(pen, node, view, scale, y, row, width) {
  const from = Math.max(0, (node.shown - view.x0) * scale), to = Math.min(width, (node.x1 - node.tokens - view.x0) * scale);
  if (to - from < 2) return;
  pen.strokeStyle = colour("never_seen");
  pen.lineWidth = 1;
  pen.beginPath();
  for (let x = from + 2; x < to - 1; x += 5) pen.moveTo(x, y + Math.min(row - 1, 6)), pen.lineTo(Math.min(x + 3, to), y);
  pen.stroke();
}

function outline(pen, node, thick, view, scale, row, width) {
  const from = Math.max(1, (node.x0 - view.x0) * scale), to = Math.min(width - 1, (node.x1 - view.x0) * scale), y = (node.level - view.level) * row;
  if (to < 0 || from > width || y < -row) return;
  pen.lineWidth = thick;
  pen.strokeStyle = colour("ink");
  pen.strokeRect(from + thick / 2 - 0.5, y + thick / 2, Math.max(3, to - from - thick), row - 1 - thick);
}

function pointed(event) {
  const canvas = $("icicle"), { data, view } = tree;
  if (!data) return null;
  const level = Math.floor(view.level + event.offsetY / rowHeight(view, canvas.clientHeight));
  return nodeAt(data, level, view.x0 + (event.offsetX / canvas.clientWidth) * (view.x1 - view.x0));
}

// Zoom to a node: at once where motion is not wanted. Where the server has left out branches below, ask it for them.
function zoomTo(node) {
  if (!node.children.length && !node.more && node.up) node = node.up;
  tree.zoom = node;
  const to = viewOf(node), from = tree.view, begun = performance.now();
  cancelAnimationFrame(tree.moving);
  tree.moving = 0;
  const step = (now) => {
    const part = Math.min(1, Math.max(0, (now - begun) / ZOOM_MS)), eased = 1 - (1 - part) ** 3;
    for (const name in to) tree.view[name] = from[name] + (to[name] - from[name]) * eased;
    tree.moving = part < 1 ? requestAnimationFrame(step) : 0;
    drawTree();
    if (part === 1) finer(node);
  };
  tree.view = { ...from };
  if (REDUCED.matches) (tree.view = to), drawTree(), finer(node);
  else tree.moving = requestAnimationFrame(step);
  showPath();
  showTreeKey();
}

function finer(node) {
  const hides = (node) => node.more > 0 || node.children.some(hides);
  if (node.up && node.id != null && tree.zoom === node && hides(node)) loadTree(node.id);
}

function zoomOut() {
  if (tree.zoom.up) return pick(tree.zoom.up), zoomTo(tree.zoom.up);
  if (tree.data === tree.top || !tree.top) return;
  const here = tree.top.known.get(tree.zoom.id); // out of a finer answer, into the whole
  tree.asking?.abort();
  tree.data = tree.top;
  if (!here) return showAll();
  tree.zoom = here;
  tree.view = viewOf(here);
  zoomOut();
}

function showAll() {
  tree.data = tree.top;
  tree.zoom = tree.chosen = tree.top?.root ?? null;
  if (!tree.top) return;
  tree.view = viewOf(tree.zoom);
  showPath();
  showNode();
  drawTree();
}

function pick(node) {
  if (!node) return;
  tree.chosen = node;
  showNode();
  drawTree();
}

// From the whole cache to the node at the top: [node, the data it stands in].
function pathOf() {
  const path = [];
  for (let node = tree.zoom; node; node = node.up) path.unshift([node, tree.data]);
  if (tree.data !== tree.top && tree.top)
    for (let node = tree.top.known.get(path[0][0].id)?.up; node; node = node.up) path.unshift([node, tree.top]);
  return path;
}

function showPath() {
  const path = pathOf(), last = innerWidth <= 900 ? 2 : 4, shown = path.length > last + 2 ? [path[0], null, ...path.slice(-last)] : path;
  steps($("path"), shown, nodeName);
  for (const item of $("path").children) set(item.firstChild, { "aria-current": item === $("path").lastChild && "true" });
}

// Buttons to nodes, as [node, the data it stands in]; null: some are left out there.
function steps(list, shown, name) {
  const make = () => el("li", {}, el("button", { type: "button", onclick: (event) => go(...event.currentTarget.parentNode.step) }, el("span"), el("span", { class: "soft" })));
  keyed(list, shown, (step) => (step ? step[0].id : "left out"), make, (item, step) => {
    item.step = step;
    set(item.firstChild, { disabled: step ? false : "" });
    put(item.firstChild.firstChild, step ? name(step[0]) : "\u2026");
    if (step?.[2]) put(item.firstChild.lastChild, step[2]);
  });
}

function go(node, data) {
  if (data !== tree.data) (tree.data = data), (tree.view = viewOf(node));
  pick(node);
  zoomTo(node);
}

function nodeName(node) {
  if (!node.up && (tree.data === tree.top || tree.top?.root.id === node.id)) return "whole cache";
  const text = tree.texts.get(node.id)?.trim();
  return text ? text.slice(0, 28) : `${short(node.tokens)} ${node.tokens === 1 ? "token" : "tokens"} at ${short(node.depth)}`;
}

// What is known of the chosen node, and its text, which the server is asked for.
let textTimer = 0, textAsked = null, textOf;
function showNode() {
  const node = tree.chosen;
  $("node-branches").hidden = !node?.children.length;
  if (!node) return put($("node-title"), "Nothing chosen"), $("node-facts").replaceChildren(el("dt", {}, "Choose a bar to see its text and who uses it.")), ($("node-text").hidden = true);
  put($("node-title"), node.up || node.tokens ? tokens(node.tokens) : "The whole cache");
  const names = users.get(node.id)?.join(", ") || (node.tenant >= 0 ? tree.data.tenants[node.tenant] : "several tenants");
  const facts = [["Begins at token", count(node.depth)], ["With all below", tokens(node.subtree)], ["Share of the cache", percent(node.subtree, tree.top?.total)], ["Last used", ago(node.used)], ["Kept in", { device: "device memory", host: "host memory", disk: "disk" }[node.tier] ?? node.tier], ["Workers", node.workers.join(", ") || "\u2013"], ["Used by", names ?? "\u2013"]];
  if (node.more) facts.push(["Smaller branches", count(node.more)]);
  $("node-facts").replaceChildren(...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
  steps($("node-branches").lastElementChild, node.children.slice(0, 5).map((child) => [child, tree.data, percent(child.subtree, node.subtree)]), nodeName);
  if (node.id === textOf) return;
  textOf = node.id;
  $("node-text").hidden = true;
  clearTimeout(textTimer);
  textAsked?.abort();
  if (node.id != null) textTimer = setTimeout(loadText, 120, node);
}

const users = new Map(); // of the chosen node, which has more than one

async function loadText(node) {
  const asked = (textAsked = new AbortController()), pre = $("node-text");
  try {
    const about = await getJSON(`/v1/live/tree/${encodeURIComponent(node.id)}`, asked.signal);
    if (asked.signal.aborted || tree.chosen?.id !== node.id) return;
    put(pre, about.text);
    pre.hidden = !about.text;
    users.clear();
    users.set(node.id, about.tenants);
    showNode();
    if (about.text) remember(node.id, about.text);
    put($("node-said"), `${tokens(node.tokens)}, used ${ago(node.used)}: ${(about.text ?? "").slice(0, 80)}`);
    showPath();
  } catch {
    if (!asked.signal.aborted) pre.hidden = true;
  }
}

function remember(id, text) {
  tree.texts.delete(id);
  tree.texts.set(id, text.slice(0, 120).replace(/\s+/g, " "));
  if (tree.texts.size > 300) tree.texts.delete(tree.texts.keys().next().value);
}

const workerNames = () => (page.state?.workers ?? []).map((worker) => worker.name);

function showTreeKey() {
  const at = isDark() ? 1 : 0;
  const named = (pairs) => pairs.map(([name, shade]) => {
    const square = el("i");
    square.style.background = shade;
    return el("span", {}, square, name);
  });
  let key;
  if (tree.mode === "tier") key = named([["device memory", TIERS.device[at]], ["host memory", TIERS.host[at]], ["disk", TIERS.disk[at]]]);
  else if (tree.mode === "use") {
    const scale = el("i", { class: "scale" });
    scale.style.background = `linear-gradient(90deg, ${heatScale(at === 1).join(",")})`;
    key = [el("span", {}, "last used: ", HEAT_NAMES[0], scale, `${HEAT_NAMES.at(-1)} ago and more`)];
  } else {
    const names = tree.mode === "who" ? (tree.data?.tenants ?? []) : workerNames();
    key = named([...names.slice(0, TENANTS).map((name, i) => [name || "(no name)", WHO[i][at]]), ["several", SHARED[at]], ...(names.length > TENANTS ? [["others", OTHER[at]]] : [])]);
  }
  const deeper = tree.zoom ? tree.zoom.below + 1 - viewOf(tree.zoom).rows : 0;
  if (deeper > 0) key.push(el("span", {}, `${deeper} levels more below: zoom in`));
  $("tree-key").replaceChildren(...key, el("span", {}, "hatched: smaller branches, sent when you zoom in"));
}

const STEPS = {
  ArrowUp: (node) => node.up,
  ArrowDown: (node) => node.children[0],
  ArrowLeft: (node) => beside(node, -1),
  ArrowRight: (node) => beside(node, 1),
};

function beside(node, by) {
  const row = tree.data.levels[node.level];
  const next = row[row.indexOf(node) + by];
  return next && within(next, tree.zoom) ? next : null;
}

function startTree() {
  const canvas = $("icicle");
  canvas.addEventListener("pointermove", (event) => {
    const node = pointed(event);
    if (node === tree.over) return;
    tree.over = node;
    sayOver();
    if (!tree.moving) drawTree();
  });
  canvas.addEventListener("pointerleave", () => ((tree.over = null), sayOver(), drawTree()));
  canvas.addEventListener("click", (event) => {
    const node = pointed(event);
    if (!node) return;
    if (node === tree.zoom) return zoomOut();
    pick(node);
    zoomTo(node);
  });
  canvas.addEventListener("keydown", (event) => {
    if (!tree.data || event.ctrlKey || event.metaKey || event.altKey) return;
    const now = tree.chosen ?? tree.zoom;
    if (STEPS[event.key]) {
      const next = tree.chosen ? STEPS[event.key](now) : now;
      if (next) pick(next);
      if (next && !within(next, tree.zoom)) zoomTo(next);
    } else if (event.key === "Enter" || event.key === " ") zoomTo(now);
    else if (event.key === "Escape" || event.key === "Backspace") zoomOut();
    else if (event.key === "Home") showAll();
    else return;
    event.preventDefault();
  });
  choose(document.querySelectorAll("[data-mode]"), (button) => ((tree.mode = button.dataset.mode), showTreeKey(), drawTree()));
  new IntersectionObserver(([entry]) => (tree.visible = entry.isIntersecting)).observe($("tree"));
  setInterval(refreshTree, TREE_SECONDS * 1000);
}

// Below the tree: what is pointed at, else the keys.
let keysText = "";
function sayOver() {
  keysText ||= $("tree-keys").textContent;
  const node = tree.over, who = node && (node.tenant < 0 ? "several tenants" : tree.data.tenants[node.tenant]);
  put($("tree-keys"), node ? `${tokens(node.tokens)} from ${count(node.depth)} on, ${count(node.subtree)} with all below \u00b7 used ${ago(node.used)} \u00b7 ${node.tier} \u00b7 ${who} \u00b7 ${node.workers.join(", ")}` : keysText);
}

function refreshTree() {
  if (!page.live || document.hidden || !tree.visible || tree.moving || tree.asking) return;
  loadTree(tree.data && tree.data !== tree.top ? tree.data.root.id : null);
}
