"use strict";
// The tree as an icicle: nodes with their place, colours, and who stands at a point. Draws nothing.

const TENANTS = 8;
const WHO = [["#3f78c5", "#6ba2e8"], ["#c46a1b", "#e39a52"], ["#2f8f6b", "#5dbf96"], ["#a8478f", "#d484bf"], ["#8a7a12", "#c9b64a"], ["#5f5bb8", "#9a97ea"], ["#b34545", "#e58585"], ["#3a8a94", "#68bcc6"]];
const TIERS = { device: ["#2f6fc4", "#5b98e0"], host: ["#c98500", "#dda23a"], disk: ["#7f8791", "#7c8794"] };
const HEAT = { light: ["#cf6a32", "#e09a5a", "#ecc895", "#cdd4d9", "#dde2e6"], dark: ["#cc7440", "#a8682f", "#785a38", "#4a525a", "#363e47"] };
const HEAT_SECONDS = [1, 10, 60, 600, 3600];
const HEAT_NAMES = ["now", "10 s", "1 min", "10 min", "1 h"];
const SHARED = ["#4a535e", "#aab4bf"], OTHER = ["#98a0a9", "#6d7782"];

// What /v1/live/tree answered, laid out: x0 and x1 in tokens from the left edge, level 0 at the top. Larger branches are
// left; sizes that are nearly equal keep the server's order, so that bars seldom jump.
function layOut(answer) {
  const nodes = answer.nodes.map(([id, parent, depth, tokens, subtree, used, tier, workers, tenant, more]) =>
    ({ id, parent, depth, tokens, subtree, used, tier, workers, tenant, more, children: [], up: null, level: 0, x0: 0, x1: subtree, shown: 0 }));
  const known = new Map(nodes.map((node) => [node.id, node]));
  const roots = [];
  for (const node of nodes) {
    node.up = known.get(node.parent) ?? null;
    (node.up ? node.up.children : roots).push(node);
  }
  const root = roots.length === 1 ? roots[0] : joined(roots);
  const size = (node) => Math.round(4 * Math.log2(node.subtree + 1));
  const levels = [];
  const place = [root];
  while (place.length) {
    const node = place.pop();
    (levels[node.level] ??= []).push(node);
    let x = node.x0;
    node.children.sort((a, b) => size(b) - size(a));
    for (const child of node.children) {
      child.level = node.level + 1;
      child.x0 = x;
      child.x1 = x += child.subtree;
    }
    node.shown = x;
    place.push(...node.children.toReversed());
  }
  return { root, known, levels, tenants: answer.tenants, total: answer.total, deepest: depths(levels) };
}

// Several trees, as of several models or tenants, stand side by side below a root of no tokens.
function joined(roots) {
  const sum = roots.reduce((sum, node) => sum + node.subtree, 0), used = Math.min(...roots.map((node) => node.used ?? Infinity));
  const root = { id: null, depth: 0, tokens: 0, subtree: sum, used, tier: "device", workers: [], tenant: -1, more: 0, children: roots, up: null, level: 0, x0: 0, x1: sum, shown: 0 };
  for (const node of roots) node.up = root;
  return root;
}

// node.below: how many levels stand below it; returns that of the root.
function depths(levels) {
  for (const level of levels.toReversed()) for (const node of level) node.below = node.children.reduce((most, child) => Math.max(most, child.below + 1), 0);
  return levels[0]?.[0].below ?? 0;
}

// The node of `level` at `x` tokens, or null. Levels are in the order of x.
function nodeAt(data, level, x) {
  const row = data.levels[level] ?? [];
  let low = 0, high = row.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (row[middle].x1 <= x) low = middle + 1;
    else high = middle;
  }
  return row[low] && row[low].x0 <= x ? row[low] : null;
}

const within = (node, root) => {
  while (node && node !== root) node = node.up;
  return node === root;
};

// A function from a node to its colour, by what colours are to say.
function painter(mode, dark, workers) {
  const at = dark ? 1 : 0;
  if (mode === "tier") return (node) => (TIERS[node.tier] ?? OTHER)[at];
  if (mode === "who") return (node) => (node.tenant < 0 ? SHARED : (WHO[node.tenant] ?? OTHER))[at];
  if (mode === "worker") return (node) => (node.workers.length > 1 ? SHARED : (WHO[workers.indexOf(String(node.workers[0]))] ?? OTHER))[at];
  const scale = heatScale(dark);
  return (node) => scale[Math.min(63, Math.floor(16 * heatPlace(node.used)))];
}

// Where seconds stand between HEAT_SECONDS: 0 to 4.
function heatPlace(seconds) {
  if (seconds == null || seconds >= HEAT_SECONDS.at(-1)) return 4;
  if (seconds <= 1) return 0;
  const above = HEAT_SECONDS.findIndex((limit) => seconds < limit);
  const [from, to] = [HEAT_SECONDS[above - 1], HEAT_SECONDS[above]];
  return above - 1 + Math.log(seconds / from) / Math.log(to / from);
}

function heatScale(dark) {
  const stops = HEAT[dark ? "dark" : "light"].map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  return Array.from({ length: 64 }, (_, i) => {
    const at = Math.min(3, Math.floor(i / 16)), part = i / 16 - at;
    return "#" + [0, 1, 2].map((c) => Math.round(stops[at][c] + (stops[at + 1][c] - stops[at][c]) * part).toString(16).padStart(2, "0")).join("");
  });
}

// Black or white, by which is read better on a colour #rrggbb.
const inks = new Map();
function inkOn(hex) {
  if (!inks.has(hex)) {
    const [r, g, b] = [1, 3, 5].map((at) => (parseInt(hex.slice(at, at + 2), 16) / 255) ** 2.2);
    inks.set(hex, 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#000" : "#fff");
  }
  return inks.get(hex);
}
