"use strict";
// Reads the controls, calls the planner's own formulas, and redraws. No number is computed here that Python does not.

const $ = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const RULES = [
  { id: "profile", label: "Efficiency from", options: DATA.profiles.map((p) => p.name) },
  { id: "gpu", label: "GPU", options: Object.keys(DATA.gpus) },
  { id: "gpus", label: "GPUs per node", values: [1, 2, 4, 8, 16] },
  { id: "nodes", label: "Nodes", min: 1, max: 64, step: 1 },
  { id: "per_gpu", label: "Batch per GPU", values: DATA.batches },
  { id: "cameras", label: "Cameras", min: 1, max: 4, step: 1 },
  { id: "text", label: "Text tokens", min: 8, max: 256, step: 8, odd: true },
  { id: "horizon", label: "Action horizon", min: 1, max: 100, step: 1 },
  { id: "precision", label: "Precision", options: ["bfloat16", "float32"] },
  { id: "kernels", label: "Kernels", options: ["eager", "stock", "compiled", "xla"] },
  { id: "checkpointing", label: "Checkpointing", options: ["none", "half", "full"] },
  { id: "sharding", label: "Sharding", options: ["none", "ddp", "zero1", "fsdp", "hsdp"] },
  { id: "ema", label: "EMA of the weights", check: true },
  { id: "efficiency", label: "Share of peak, %", min: 1, max: 100, step: 0.5 },
  { id: "frames", label: "Timesteps, millions", number: true, min: 0.001 },
  { id: "price", label: "Price per GPU-hour", number: true, min: 0 },
];

function buildControls() {
  const form = $("controls");
  for (const rule of RULES) {
    const label = document.createElement("label");
    label.htmlFor = rule.id;
    const name = document.createElement("span");
    name.textContent = rule.label;
    let input;
    if (rule.options) {
      input = document.createElement("select");
      for (const value of rule.options) input.add(new Option(value, value));
    } else {
      input = document.createElement("input");
      input.type = rule.check ? "checkbox" : rule.number ? "number" : "range";
      if (rule.values) [input.min, input.max, input.step] = [0, rule.values.length - 1, 1];
      else if (!rule.check) [input.min, input.max, input.step] = [rule.min, rule.max ?? "", rule.number ? "any" : rule.step];
    }
    input.id = rule.id;
    if (rule.check) {
      label.className = "check";
      label.append(input, name);
    } else {
      const shown = document.createElement("output");
      shown.id = rule.id + "-shown";
      label.append(name, shown, input);
    }
    form.append(label);
  }
  const button = document.createElement("button");
  button.type = "button";
  button.id = "reset";
  button.textContent = "Back to the plan";
  button.addEventListener("click", () => { setControls(); update(); });
  form.append(button);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => {
    if (event.target.id === "profile") $("efficiency").value = 100 * profile().hfu;
    update();
  });
}

const rule = (id) => RULES.find((r) => r.id === id);
const profile = () => DATA.profiles.find((p) => p.name === $("profile").value);

function setControls() {
  const c = DATA.choices;
  const start = { ...c, per_gpu: c.batch / (c.gpus * c.nodes), profile: DATA.profiles[0].name, gpu: DATA.gpu,
    efficiency: 100 * DATA.profiles[0].hfu, frames: c.frames / 1e6 };
  for (const r of RULES) {
    const input = $(r.id);
    if (r.check) input.checked = start[r.id] > 0;
    else if (r.values) {
      if (!r.values.includes(start[r.id])) { r.values.push(start[r.id]); r.values.sort((a, b) => a - b); input.max = r.values.length - 1; }
      input.value = r.values.indexOf(start[r.id]);
    } else {
      if (r.odd) { input.step = 1; }
      if (r.id === "efficiency") input.step = "any";
      if (r.max && start[r.id] > r.max) input.max = start[r.id];
      input.value = start[r.id];
    }
  }
}

const read = (id) => (rule(id).values ? rule(id).values[Number($(id).value)] : Number($(id).value));

function choices() {
  const u = { ...DATA.choices };
  for (const id of ["gpus", "nodes", "cameras", "text", "horizon", "price"]) u[id] = read(id);
  for (const id of ["precision", "kernels", "checkpointing", "sharding"]) u[id] = $(id).value;
  u.ema = $("ema").checked ? 1 : 0;
  u.batch = read("per_gpu") * u.gpus * u.nodes;
  u.hfu = Number($("efficiency").value) / 100;
  u.overhead = profile().overhead;
  u.frames = Number($("frames").value) * 1e6;
  return u;
}

const settings = (u) => configure(DATA.base, u, DATA.gpus[$("gpu").value]);

function short(x, digits = 4) {
  if (!Number.isFinite(x)) return "–";
  const size = Math.abs(x);
  if (size >= 1e9) return (x / 1e9).toPrecision(digits) + " B";
  if (size >= 1e6) return (x / 1e6).toPrecision(digits) + " M";
  if (size >= 1000) return Math.round(x).toLocaleString("en").replaceAll(",", " ");
  if (size === 0) return "0";
  return String(Number(x.toPrecision(digits)));
}

function card(id, name, value, unit, note, state) {
  return `<div class="card ${state || ""}" id="card-${id}" data-value="${value}"><div class="name">${name}</div>` +
    `<div class="value">${typeof value === "number" ? short(value) : value} ${unit}</div><div class="note">${note}</div></div>`;
}

function update() {
  const u = choices();
  const s = settings(u);
  const found = evaluate(DATA.costs, s);
  const p = profile();
  const [low, high] = p.factors;
  const room = s.capacity - s.slack;
  const fits = found.memory.peak <= room;
  for (const r of RULES) {
    if ($(r.id + "-shown")) $(r.id + "-shown").textContent = r.options || r.number ? "" : r.id === "efficiency" ? u.hfu * 100 < 100 ? (u.hfu * 100).toFixed(1) : "100" : short(read(r.id));
  }
  const share = u.nodes > 1 ? DATA.shares[1] : 1;
  const rate = node_rate(DATA.costs.flops, s) * u.nodes * share;
  const wall = days(u.frames, rate);
  const hoursOfGpu = wall * 24 * u.gpus * u.nodes;
  $("cards").innerHTML = [
    card("rate", "samples/s", rate, "", `${short(rate * low)}–${short(rate * high)} · derived`),
    card("step", "step", found.stages.step, "s", `global batch ${short(u.batch)} · derived`),
    card("days", "days", wall, "", `${short(wall / high)}–${short(wall / low)} · ${short(Math.ceil(u.frames / u.batch))} steps`),
    card("peak", "peak memory per GPU", found.memory.peak / 1e9, "GB", fits ? `fits in ${short(room / 1e9)} GB` : `does not fit in ${short(room / 1e9)} GB`, fits ? "good" : "bad"),
    card("largest", "largest batch per GPU", found.largest, "", "peak + slack ≤ capacity · derived"),
    card("flops", "executed per sample", found.model_flops / 1e12, "TFLOP", `share of peak ${(100 * u.hfu).toFixed(1)} % · ${p.kind}`),
    card("gpu-hours", "GPU-hours", hoursOfGpu, "", `${u.gpus * u.nodes} GPUs · derived`),
    card("cost", "cost", u.price > 0 ? hoursOfGpu * u.price : "no price given", "", u.price > 0 ? `${short(hoursOfGpu * u.price / high)}–${short(hoursOfGpu * u.price / low)} · your price` : "Piston ships none"),
  ].join("");
  drawRate(u, p);
  drawMemory(u, room);
  drawDays(u, p);
  drawStages(found.stages);
  drawParts(found.memory, room);
  drawLandscape(u);
}

const plots = {};
function draw(id, title, xs, series, options) {
  const box = $(id);
  const width = Math.max(240, box.clientWidth);
  if (plots[id]) plots[id].destroy();
  const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") } };
  const spec = {
    width, height: 240, scales: { x: { time: false, distr: options.log ? 3 : 1, log: 2 }, y: { range: (_, lo, hi) => [0, (hi || 1) * 1.05] } },
    axes: [
      { ...axis, label: options.x, labelSize: 18, values: (_, ticks) => ticks.map((t) => (t === null || t < 1 ? "" : short(t, 3))) },
      { ...axis, label: options.y, labelSize: 18, size: 58, values: (_, ticks) => ticks.map((t) => short(t, 3)) },
    ],
    series: [{ label: options.x }, ...series.map((one) => ({
      label: one.label, class: one.thin ? "edge" : undefined, stroke: one.color, width: one.thin ? 0 : 2, dash: one.dash, points: { show: Boolean(one.points) },
      value: (_, v) => (v === null ? "–" : short(v)),
    }))],
    bands: options.bands ? [{ series: options.bands, fill: css("--band") }] : [],
    cursor: { y: false },
  };
  plots[id] = new uPlot(spec, [xs, ...series.map((one) => one.values)], box);
  box.setAttribute("aria-label", title);
  $(id + "-caption").textContent = title;
}

function drawRate(u, p) {
  const xs = DATA.batches;
  const rates = xs.map((b) => {
    const s = settings({ ...u, batch: b * u.gpus * u.nodes });
    return node_rate(DATA.costs.flops, s) * u.nodes * (u.nodes > 1 ? DATA.shares[1] : 1);
  });
  const color = css("--accent");
  draw("rate", `${short(rates[0])} samples/s at ${xs[0]} per GPU, ${short(rates.at(-1))} at ${xs.at(-1)}; band ×${p.factors[0].toFixed(2)}–${p.factors[1].toFixed(2)} (${p.source})`,
    xs, [
      { label: "high", values: rates.map((r) => r * p.factors[1]), color, thin: true },
      { label: "low", values: rates.map((r) => r * p.factors[0]), color, thin: true },
      { label: "samples/s", values: rates, color },
    ], { x: "batch per GPU", y: "samples/s", log: true, bands: [1, 2] });
}

function drawMemory(u, room) {
  const xs = DATA.batches;
  const peaks = xs.map((b) => {
    const s = settings({ ...u, batch: b * u.gpus * u.nodes });
    return memory(DATA.costs.units[s.precision], s).peak / 1e9;
  });
  const inside = peaks.filter((peak) => peak <= room / 1e9).length;
  draw("memory", inside ? `${short(peaks[inside - 1])} GB at ${xs[inside - 1]} per GPU is the last point under ${short(room / 1e9)} GB` : `Not even ${xs[0]} per GPU fits in ${short(room / 1e9)} GB`,
    xs, [
      { label: "peak GB", values: peaks.map((v) => Math.min(v, 4 * room / 1e9)), color: css("--accent") },
      { label: "usable GB", values: xs.map(() => room / 1e9), color: css("--second"), dash: [6, 4] },
    ], { x: "batch per GPU", y: "GB", log: true });
}

function drawDays(u, p) {
  const s = settings(u);
  const rate = node_rate(DATA.costs.flops, s);
  const xs = Array.from({ length: Math.max(8, u.nodes) }, (_, i) => i + 1);
  const at = (n, share) => days_on(rate, u.frames, n, share);
  const [worst, middle, best] = DATA.shares;
  const slow = xs.map((n) => at(n, worst) / p.factors[0]);
  const fast = xs.map((n) => at(n, best) / p.factors[1]);
  const likely = xs.map((n) => at(n, middle));
  draw("days", `${short(likely[0])} days on 1 node, ${short(likely.at(-1))} on ${xs.at(-1)}; the node's batch kept, so the global batch grows`,
    xs, [
      { label: "slow", values: slow, color: css("--accent"), thin: true },
      { label: "fast", values: fast, color: css("--accent"), thin: true },
      { label: "expected", values: likely, color: css("--accent") },
      { label: "linear", values: xs.map((n) => at(n, 1)), color: css("--second"), dash: [6, 4] },
    ], { x: "nodes", y: "days", bands: [1, 2] });
  if (!(u.price > 0)) {
    if (plots.cost) { plots.cost.destroy(); delete plots.cost; }
    $("cost-caption").textContent = "No price given: Piston ships none. Set a price per GPU-hour.";
    return;
  }
  const money = (values) => values.map((d, i) => d * 24 * u.gpus * xs[i] * u.price);
  const costs = money(likely);
  draw("cost", `${short(costs[0])} on 1 node, ${short(costs.at(-1))} on ${xs.at(-1)}, at ${u.price} per GPU-hour`,
    xs, [
      { label: "high", values: money(slow), color: css("--accent"), thin: true },
      { label: "low", values: money(fast), color: css("--accent"), thin: true },
      { label: "expected", values: costs, color: css("--accent") },
    ], { x: "nodes", y: "cost", bands: [1, 2] });
}

function bars(id, rows) {
  $(id).innerHTML = rows.map((r) =>
    `<div class="bar"><span>${r.name}</span><span class="track"><span class="fill ${r.style || ""}" style="left:${100 * (r.start || 0)}%;width:${100 * r.share}%"></span></span>` +
    `<span class="number">${r.text}</span></div>`).join("");
}

function drawStages(t) {
  const rows = [["compute", t.compute, ""], ["host overhead", t.overhead, ""], ["network, exposed", t.exposed, ""],
    ["network, in all", t.network, "hidden"], ["copy to device", t.copy, "hidden"], ["decode", t.data, "hidden"]];
  let start = 0;
  bars("stages", rows.map(([name, seconds, style]) => {
    const row = { name, share: Math.min(1, seconds / t.step), start: style ? 0 : start, style, text: `${short(seconds)} s` };
    if (!style) start += row.share;
    return row;
  }));
  const binding = rows.filter((r) => !r[2]).sort((a, b) => b[1] - a[1])[0];
  $("stages-caption").textContent = `${short(t.step)} s per step; ${binding[0]} binds. Hatched runs behind the step; decode is shown when --cores was given.`;
}

function drawParts(m, room) {
  const parts = [["weights", m.weights], ["Adam moments", m.moments], ["EMA", m.ema], ["gradients", m.gradients], ["kept by forward", m.saved], ["peak", m.peak], ["usable", room]];
  const most = Math.max(...parts.map((p) => p[1]));
  bars("parts", parts.map(([name, bytes]) => ({ name, share: bytes / most, style: name === "usable" ? "mine" : "", text: `${short(bytes / 1e9)} GB` })));
  $("parts-caption").textContent = "Gradients and what forward keeps are not all alive at once: the peak is not the sum.";
}

function drawLandscape(u) {
  const rows = [...DATA.landscape, { name: "this plan", timesteps: u.frames, mine: true }];
  const known = rows.filter((r) => r.timesteps).map((r) => Math.log10(r.timesteps));
  const low = Math.min(...known) - 0.5, high = Math.max(...known);
  bars("landscape", rows.map((r) => ({
    name: r.name, share: r.timesteps ? (Math.log10(r.timesteps) - low) / (high - low) : 0, style: r.mine ? "mine" : "",
    text: r.timesteps ? short(r.timesteps, 3) : '<span class="missing">not reported</span>',
  })));
}

buildControls();
setControls();
update();
window.addEventListener("resize", update);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", update);
