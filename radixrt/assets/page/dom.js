"use strict";
// Makes and updates elements. Whatever a client wrote becomes a text node or an attribute, never HTML.

const $ = (id) => document.getElementById(id);
const REDUCED = matchMedia("(prefers-reduced-motion: reduce)");

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  set(node, attributes);
  node.append(...children);
  return node;
}

function svg(tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  set(node, attributes);
  return node;
}

function set(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === false || value == null) node.removeAttribute(name);
    else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
  }
}

function put(node, value) {
  const text = String(value ?? "");
  if (node.textContent !== text) node.textContent = text;
}

// Let `parent` have one child for each item, in their order. Children stay the same elements, so that focus does.
function keyed(parent, items, key, make, show) {
  const old = parent.shown ?? new Map();
  const shown = new Map(items.map((item) => [String(key(item)), item]));
  for (const [id, node] of old) if (!shown.has(id)) node.remove();
  let next = parent.firstElementChild;
  for (const [id, item] of shown) {
    const node = old.get(id) ?? make(item);
    if (node === next) next = next.nextElementSibling;
    else parent.insertBefore(node, next);
    show(node, item);
    shown.set(id, node);
  }
  parent.shown = shown;
}

// A table of `columns`: {name, kind (class), help, text(row) or show(cell, row)}. Roles are explicit, since on phones rows are blocks.
function table(node, columns, key, options = {}) {
  node.setAttribute("role", "table");
  const heads = columns.map((column) => el("th", { scope: "col", role: "columnheader", class: column.kind, title: column.help }, column.name));
  const body = el("tbody", { role: "rowgroup" });
  node.append(el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...heads)), body);
  const make = (row) => {
    const line = el("tr", { role: "row" });
    for (const { name, kind, label } of columns) line.append(el("td", { role: "cell", class: kind, "data-name": label === false ? null : name }));
    options.made?.(line, row);
    return line;
  };
  const show = (line, row) => {
    line.row = row;
    columns.forEach((column, at) => (column.show ? column.show(line.cells[at], row) : put(line.cells[at], column.text(row))));
  };
  return (rows) => {
    node.hidden = !rows.length;
    $(node.id + "-empty").hidden = rows.length > 0;
    keyed(body, rows, key, make, show);
  };
}

// A bar of `parts` [[colour, tokens, name]] of `whole` tokens, with a mark at `mark`.
function bar(node, parts, whole, mark, said) {
  let line = node.classList.contains("bar") ? node : node.firstElementChild;
  if (!line) node.append((line = el("div", { class: "bar" })));
  parts = parts.filter((part) => part[1] > 0);
  let cells = line.querySelectorAll("i");
  while (cells.length > parts.length) line.querySelector("i:last-of-type").remove(), (cells = line.querySelectorAll("i"));
  while (cells.length < parts.length) line.insertBefore(el("i"), line.querySelector("u")), (cells = line.querySelectorAll("i"));
  parts.forEach(([colour, tokens, name], at) => {
    cells[at].style.setProperty("--c", `var(--${colour})`);
    cells[at].style.width = `calc(${(100 * tokens) / whole}% - 1px)`;
    set(cells[at], { title: `${name}: ${count(tokens)} (${percent(tokens, whole)})` });
  });
  let at = line.querySelector("u");
  if (mark == null) at?.remove();
  else {
    if (!at) line.append((at = el("u")));
    at.style.left = `${(100 * mark) / whole}%`;
    set(at, { title: `possible: ${count(mark)} (${percent(mark, whole)})` });
  }
  set(line, { role: "img", "aria-label": said ?? parts.map((part) => `${part[2]} ${percent(part[1], whole)}`).join(", ") });
}

const GROUPED = new Intl.NumberFormat("en");
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const count = (number) => (number == null ? "\u2013" : GROUPED.format(Math.round(number)));
const short = (number) => (number < 10000 ? count(number) : SHORT.format(number).replace("K", "k"));
const percent = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(1)}%` : "\u2013");
const tokens = (number) => `${count(number)} token${number === 1 ? "" : "s"}`;
const clock = (unix) => new Date(unix * 1000).toLocaleTimeString("en-GB");

function span(seconds) {
  if (seconds == null) return "\u2013";
  if (seconds < 0.0995) return `${(seconds * 1000).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(seconds < 1 ? 2 : 1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
  if (!hours) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  return days ? `${days} d ${hours % 24} h` : `${hours} h ${minutes % 60} min`;
}

const ago = (seconds) => (seconds == null ? "unknown" : seconds < 1 ? "just now" : `${span(seconds)} ago`);

// The colours of the style sheet as canvases take them; asked for again when the scheme changes.
const colours = new Map();
function colour(name) {
  if (!colours.has(name)) {
    const probe = document.body.appendChild(el("i"));
    probe.style.color = `var(--${name})`;
    colours.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return colours.get(name);
}

// The canvas's context, with its size in CSS pixels.
function context(canvas) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

// Buttons of a group, of which one is pressed.
function choose(buttons, chosen) {
  for (const button of buttons)
    button.addEventListener("click", () => {
      for (const other of buttons) other.setAttribute("aria-pressed", other === button);
      chosen(button);
    });
}
