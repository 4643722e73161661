"""What draws a simulated step in a browser, without a library (no torch here)."""

STYLE = """
canvas { display: block; width: 100%; } #time canvas { cursor: crosshair; touch-action: none; }
.legend i.path { background: transparent; border: 2px solid #d6204e; }
#tip { position: fixed; pointer-events: none; background: var(--card); color: var(--ink); border: 1px solid var(--rule);
  border-radius: 6px; padding: 6px 10px; font-size: 13px; box-shadow: 0 2px 10px #0003; white-space: pre; z-index: 2;
  font-variant-numeric: tabular-nums; }
"""

SCRIPT = r"""
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const LEFT = 64, TOP = 4, BOTTOM = 22, CRITICAL = "#d6204e";
const row = data.rows.length > 40 ? 13 : data.measured ? 44 : 28, bar = row - 4, thin = data.measured ? 12 : 0;
const own = bar - thin, tip = document.getElementById("tip");
const time = document.querySelector("#time canvas"), kept = document.querySelector("#kept canvas");
const last = Math.max(data.span, ...(data.measured || []).map(r => r[r.length - 1][1]));
let low = 0, high = last, width = 0, wish = 0;

const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name);
const x = t => LEFT + (t - low) / (high - low) * (width - LEFT - 8);
const at = px => low + (px - LEFT) / (width - LEFT - 8) * (high - low);
const text = t => (t === 0 ? "0" : Number(t.toPrecision(5)).toString());
const name = a => a[2] + a[4] + (data.chunks > 1 ? " of chunk " + a[3] : "");

function sized(canvas, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.style.height = height + "px";
  canvas.width = Math.round(width * scale); canvas.height = Math.round(height * scale);
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.font = "11px system-ui, sans-serif"; pen.textBaseline = "middle";
  return pen;
}
function first(actions) {  // the first action that ends behind the left edge
  let a = 0, b = actions.length;
  while (a < b) { const m = (a + b) >> 1; if (actions[m][1] < low) a = m + 1; else b = m; }
  return a;
}
function bars(pen, actions, y, height) {
  let until = -1;
  for (let i = first(actions); i < actions.length && actions[i][0] <= high; i++) {
    const a = actions[i], from = Math.max(x(a[0]), LEFT), to = Math.min(x(a[1]), width - 8);
    if (to - until < 0.3 && !a[5]) continue;  // below a pixel
    until = to;
    const [fill, ink] = data.colours[a[2] + a[3]], label = String(a[4]);
    pen.fillStyle = fill; pen.fillRect(from, y, Math.max(to - from - 0.6, 0.3), height);
    if (a[5]) {
      pen.strokeStyle = CRITICAL; pen.lineWidth = 2;
      if (to - from > 5) pen.strokeRect(from + 1, y + 1, to - from - 2.6, height - 2);
      else {
        pen.fillStyle = CRITICAL;
        for (const edge of [y, y + height - 2]) pen.fillRect(from, edge, Math.max(to - from, 0.5), 2);
      }
    }
    if (to - from > 7 * label.length + 4 && height > 9) {
      pen.fillStyle = ink; pen.textAlign = "center"; pen.fillText(label, (from + to) / 2, y + height / 2 + 0.5);
    }
  }
}
function axis(pen, y) {
  const rough = (high - low) / Math.max(3, width / 110), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(f => f * power).find(s => s >= rough);
  pen.fillStyle = colour("--soft"); pen.textAlign = "center";
  for (let t = Math.ceil(low / step) * step; t <= high; t += step) {
    pen.fillRect(x(t), y, 1, 4); pen.fillText(text(t), Math.min(Math.max(x(t), LEFT), width - 16), y + 12);
  }
}
function label(pen, r, y) { pen.fillStyle = colour("--soft"); pen.textAlign = "right"; pen.fillText("rank " + r, LEFT - 8, y); }

function draw() {
  wish = 0;
  width = time.parentElement.clientWidth;
  const pen = sized(time, TOP + data.rows.length * row + BOTTOM);
  data.rows.forEach((actions, r) => {
    const y = TOP + r * row;
    label(pen, r, y + own / 2);
    pen.fillStyle = colour("--idle"); pen.fillRect(LEFT, y, width - LEFT - 8, bar);
    bars(pen, actions, y, own);
    if (data.measured) bars(pen, data.measured[r], y + own + 2, thin - 2);
  });
  pen.strokeStyle = CRITICAL; pen.lineWidth = 1.6;
  pen.save(); pen.beginPath(); pen.rect(LEFT, 0, width - LEFT - 8, TOP + data.rows.length * row); pen.clip();
  for (const [from, to, start, end] of data.jumps) {
    if (end < low || start > high) continue;
    const down = to > from;
    pen.beginPath();
    pen.moveTo(x(start), TOP + from * row + (down ? own : 0)); pen.lineTo(x(end), TOP + to * row + (down ? 0 : own));
    pen.stroke();
  }
  pen.restore();
  axis(pen, TOP + data.rows.length * row);
  curves();
}
function curves() {
  const most = Math.max(1, ...data.flight.flat().map(p => p[1]), ...data.held.flat().map(p => p[1]));
  const pen = sized(kept, TOP + data.rows.length * row + BOTTOM);
  data.rows.forEach((_, r) => {
    const y = TOP + r * row, floor = y + bar;
    label(pen, r, y + bar / 2);
    pen.fillStyle = colour("--grid"); pen.fillRect(LEFT, floor, width - LEFT - 8, 1);
    pen.save(); pen.beginPath(); pen.rect(LEFT, y - 2, width - LEFT - 8, bar + 4); pen.clip();
    steps(pen, data.flight[r], most, floor, true);
    steps(pen, data.held[r], most, floor, false);
    pen.restore();
  });
  axis(pen, TOP + data.rows.length * row);
}
function steps(pen, points, most, floor, filled) {
  if (!points.length) return;
  const y = n => floor - n / most * (bar - 2);
  pen.beginPath(); pen.moveTo(x(0), floor);
  let n = 0;
  for (const [t, next] of points) { pen.lineTo(x(t), y(n)); pen.lineTo(x(t), y(next)); n = next; }
  pen.lineTo(x(data.span), y(n));
  if (filled) {
    pen.lineTo(x(data.span), floor);
    pen.fillStyle = colour("--c0"); pen.globalAlpha = 0.45; pen.fill(); pen.globalAlpha = 1;
  } else { pen.setLineDash([4, 3]); pen.lineWidth = 1.5; pen.strokeStyle = colour("--c4"); pen.stroke(); pen.setLineDash([]); }
}
function later() { if (!wish) wish = requestAnimationFrame(draw); }
function move(to, length) {
  length = Math.min(Math.max(length, last / 1e5), last);
  low = Math.min(Math.max(to, 0), last - length); high = low + length;
  later();
}

function count(points, t) { let n = 0; for (const [when, next] of points) { if (when > t) break; n = next; } return n; }
function words(r, a, isMeasured) {
  const lines = [(isMeasured ? "measured: " : "") + data.kinds[a[2]] + " " + name(a) + ", rank " + r,
    text(a[0]) + " to " + text(a[1]) + "  (" + text(a[1] - a[0]) + ")"];
  if (isMeasured) return lines.join("\n");
  const wait = a[0] - a[6];
  lines.push(wait > 0 ? "the rank waited " + text(wait) + " before it" : "the rank did not wait");
  if (a.length > 7) {
    lines.push("from rank " + a[7] + ": made " + text(a[8]) + ", sent " + text(a[9]) + " to " + text(a[10]));
    if (a[11] > a[10]) lines.push("its call ended " + text(a[11]));
  }
  lines.push("in flight " + count(data.flight[r], a[0]) + (data.held[r].length ? ", held " + count(data.held[r], a[0]) : ""));
  if (a[5]) lines.push("on the critical path");
  return lines.join("\n");
}
function show(event) {
  const box = time.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top - TOP;
  const r = Math.floor(py / row), inside = py - r * row, isMeasured = data.measured && inside > own;
  const actions = (isMeasured ? data.measured : data.rows)[r], t = at(px);
  const a = actions && px >= LEFT && inside <= bar ? actions.find(each => each[0] <= t && t < each[1]) : undefined;
  tip.hidden = !a;
  if (!a) return;
  tip.textContent = words(r, a, isMeasured);
  tip.style.left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8) + "px";
}

let held = null;
time.addEventListener("pointerdown", e => { held = [e.clientX, low]; time.setPointerCapture(e.pointerId); });
time.addEventListener("pointerup", () => { held = null; });
time.addEventListener("pointermove", e => {
  if (held) move(held[1] - (e.clientX - held[0]) / (width - LEFT - 8) * (high - low), high - low);
  else show(e);
});
time.addEventListener("pointerleave", () => { tip.hidden = true; });
time.addEventListener("dblclick", () => move(0, last));
time.addEventListener("wheel", e => {
  if (e.shiftKey) return;
  e.preventDefault();
  const middle = at(e.clientX - time.getBoundingClientRect().left), factor = Math.exp(e.deltaY * 0.0015);
  move(middle - (middle - low) * factor, (high - low) * factor);
}, { passive: false });
window.addEventListener("resize", later);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", later);
draw();
"""
