"use strict";
// The hit rate over time, against what was possible.

const STEP_SECONDS = 5, SMOOTH_POINTS = 6;
const chart = { points: [], minutes: 30, at: null };

// Points of the last `minutes`: {ago, prompt (a second), hit, bound: shares over the last 30 s, or null without prompts}.
function chartPoints(points, minutes) {
  const last = points.at(-1)?.[0] ?? 0, found = [];
  for (let i = 0; i < points.length; i++) {
    const age = last - points[i][0];
    if (age > minutes * 60) continue;
    let prompt = 0, hit = 0, bound = 0;
    for (let j = i; j >= 0 && points[i][0] - points[j][0] < SMOOTH_POINTS * STEP_SECONDS; j--) {
      prompt += points[j][1], hit += points[j][2], bound += points[j][3];
    }
    found.push({ ago: age, load: points[i][1] / STEP_SECONDS, prompt, hit: prompt ? hit / prompt : null, bound: prompt ? bound / prompt : null });
  }
  return found;
}

// The point of the running 5 s comes each second. Its time may be told as a second more or less.
function addPoint(point) {
  const points = chart.points;
  if (points.length && point[0] - points.at(-1)[0] < STEP_SECONDS / 2) points[points.length - 1] = point;
  else points.push(point);
  if (points.length > 400) points.splice(0, points.length - 400);
}

function drawChart() {
  const { pen, width, height } = context($("chart"));
  const shown = chartPoints(chart.points, chart.minutes);
  const left = 38, right = 58, top = 8, floor = height - 20, loads = 34, base = floor - loads - 6;
  const x = (ago) => left + (width - left - right) * (1 - ago / (chart.minutes * 60));
  const y = (share) => base - (base - top) * share;
  pen.font = "11px system-ui, sans-serif";
  pen.fillStyle = colour("soft");
  pen.strokeStyle = colour("line");
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  for (const share of [0, 0.5, 1]) {
    pen.fillText(`${share * 100}%`, left - 7, y(share));
    line(pen, [[left, Math.round(y(share)) + 0.5], [width - right, Math.round(y(share)) + 0.5]]);
  }
  pen.textAlign = "center";
  const every = chart.minutes / 5;
  for (let minutes = 0; minutes <= chart.minutes; minutes += every) pen.fillText(minutes ? `\u2212${minutes} min` : "now", x(minutes * 60), height - 7);
  const most = Math.max(1, ...shown.map((point) => point.load)), bars = Math.max(1, (x(0) - x(STEP_SECONDS)) * 0.75);
  pen.fillStyle = colour("load");
  for (const point of shown) pen.fillRect(x(point.ago) - bars / 2, floor - (loads * point.load) / most, bars, (loads * point.load) / most);
  for (const run of runs(shown)) {
    const hits = run.map((point) => [x(point.ago), y(point.hit)]), bounds = run.map((point) => [x(point.ago), y(point.bound)]);
    fill(pen, [...bounds, ...hits.toReversed()], colour("lost"));
    pen.globalAlpha = 0.16;
    fill(pen, [...hits, [hits.at(-1)[0], y(0)], [hits[0][0], y(0)]], colour("hit"));
    pen.globalAlpha = 1;
    pen.setLineDash([4, 3]);
    pen.strokeStyle = colour("bound");
    pen.lineWidth = 1.25;
    line(pen, bounds);
    pen.setLineDash([]);
    pen.strokeStyle = colour("hit");
    pen.lineWidth = 2;
    line(pen, hits);
  }
  label(pen, shown, width - right + 6, y);
  sayPoint(shown, pen, x, y, floor, top);
}

// Without prompts there is no rate: the lines stop there.
function runs(points) {
  const found = [[]];
  for (const point of points)
    if (point.prompt) found.at(-1).push(point);
    else if (found.at(-1).length) found.push([]);
  return found.filter((run) => run.length);
}

function line(pen, points) {
  pen.beginPath();
  for (const [x, y] of points) pen.lineTo(x, y);
  pen.stroke();
}

function fill(pen, points, colour) {
  pen.beginPath();
  for (const [x, y] of points) pen.lineTo(x, y);
  pen.fillStyle = colour;
  pen.fill();
}

// What the lines have reached, at their ends.
function label(pen, shown, x, y) {
  const last = shown.at(-1);
  if (!last?.prompt) return;
  let hit = y(last.hit), bound = y(last.bound);
  if (hit - bound < 14) (bound = (hit + bound) / 2 - 7), (hit = bound + 14);
  pen.textAlign = "left";
  pen.fillStyle = colour("hit");
  pen.font = "600 13px system-ui, sans-serif";
  pen.fillText(`${(100 * last.hit).toFixed(0)}%`, x, hit);
  pen.fillStyle = colour("ink");
  pen.font = "12px system-ui, sans-serif";
  pen.fillText(`${(100 * last.bound).toFixed(0)}%`, x, bound);
}

function sayPoint(shown, pen, x, y, floor, top) {
  const chosen = chart.at == null ? shown.at(-1) : shown.reduce((best, point) => (Math.abs(point.ago - chart.at) < Math.abs(best.ago - chart.at) ? point : best), shown[0]);
  if (!chosen) return put($("chart-at"), "No prompt yet.");
  const when = chart.at == null ? "Last 30 s" : `30 s until ${span(chosen.ago)} ago`;
  const rate = chosen.prompt ? `${(100 * chosen.hit).toFixed(1)}% hit of ${(100 * chosen.bound).toFixed(1)}% possible, ${count(chosen.prompt)} prompt tokens` : "no prompts";
  put($("chart-at"), `${when}: ${rate}`);
  if (chart.at == null) return;
  pen.strokeStyle = colour("soft");
  pen.lineWidth = 1;
  line(pen, [[x(chosen.ago), top], [x(chosen.ago), floor]]);
  if (!chosen.prompt) return;
  for (const [share, name] of [[chosen.bound, "bound"], [chosen.hit, "hit"]]) {
    pen.beginPath();
    pen.arc(x(chosen.ago), y(share), 3.5, 0, 7);
    pen.fillStyle = colour(name);
    pen.fill();
  }
}

function startChart() {
  const canvas = $("chart");
  canvas.addEventListener("pointermove", (event) => {
    const share = (event.offsetX - 38) / (canvas.clientWidth - 96);
    chart.at = Math.min(1, Math.max(0, 1 - share)) * chart.minutes * 60;
    drawChart();
  });
  canvas.addEventListener("pointerleave", () => ((chart.at = null), drawChart()));
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: STEP_SECONDS, ArrowRight: -STEP_SECONDS }[event.key];
    if (by) chart.at = Math.min(chart.minutes * 60, Math.max(0, (chart.at ?? 0) + by * (event.shiftKey ? 12 : 1)));
    else if (event.key === "Escape") chart.at = null;
    else return;
    event.preventDefault();
    drawChart();
  });
  choose(document.querySelectorAll("[data-minutes]"), (button) => ((chart.minutes = Number(button.dataset.minutes)), drawChart()));
}
