"use strict";
// Texts of memories come from anywhere: they only ever become text nodes.
const $ = (id) => document.getElementById(id);
const PAGE = 50;
let offset = 0;
let key = sessionStorage.getItem("key") || "";

async function get(path, query = {}) {
  const url = new URL(path, location.href);
  for (const [name, value] of Object.entries(query)) if (value !== "") url.searchParams.set(name, value);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(url, { headers });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error.message);
  return found;
}

function cell(row, value, number) {
  const made = row.insertCell();
  made.textContent = value === null || value === undefined ? "" : String(value);
  if (number) made.className = "number";
  return made;
}

function link(parent, id) {
  const made = document.createElement("button");
  made.type = "button";
  made.className = "link";
  made.textContent = `#${id}`;
  made.addEventListener("click", () => safely(() => show(id)));
  parent.append(" ", made);
}

const short = (number) => (number === null || number === undefined ? "" : Number(number).toFixed(3));

async function list() {
  const how = document.querySelector("input[name=how]:checked").value;
  const query = { limit: PAGE, offset, [how]: $("words").value.trim() };
  const found = await get("memories", query);
  $("summary").textContent = `${found.total} memories`;
  $("rows").replaceChildren();
  for (const one of found.memories) {
    const row = $("rows").insertRow();
    row.className = "pick";
    row.tabIndex = 0;
    row.dataset.id = one.id;
    cell(row, one.id, true);
    cell(row, short(one.q), true);
    cell(row, one.visits, true);
    cell(row, one.success ? "success" : "failure");
    cell(row, short(one.similarity), true);
    cell(row, one.task);
    const open = () => safely(() => show(one.id));
    row.addEventListener("click", open);
    row.addEventListener("keydown", (event) => event.key === "Enter" && open());
  }
  $("back").disabled = offset === 0;
  $("more").disabled = found.memories.length < PAGE;
}

async function show(id) {
  const one = await get(`memories/${id}`);
  $("one").hidden = false;
  $("title").textContent = `Memory ${one.id}: ${one.task}`;
  $("text").textContent = one.text;
  draw(one.q_over_time);
  const lineage = $("lineage");
  const gone = one.removed === null ? "" : ` Removed by version ${one.removed}.`;
  lineage.textContent = `Q ${short(one.q)} after ${one.visits} visits, ${one.wins} won. Written by ` +
    `${one.written_by || "an import"}.${gone} Parents:`;
  if (!one.parents.length) lineage.append(" none");
  for (const parent of one.parents) link(lineage, parent);
  lineage.append("; children:");
  if (!one.children.length) lineage.append(" none");
  for (const child of one.children) link(lineage, child);
  $("reads").replaceChildren();
  for (const read of one.last_reads.slice(-PAGE).reverse()) {
    const row = $("reads").insertRow();
    cell(row, read.version, true);
    cell(row, read.trial);
    cell(row, read.reward === null ? "unknown" : read.reward, true);
  }
}

function element(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  made.textContent = text;
  $("chart").append(made);
}

// Q holds from the version that set it to the next: a staircase.
function draw(states) {
  $("chart").replaceChildren();
  const first = states[0].version, last = states[states.length - 1];
  const end = Math.max(last.until || last.version + 1, first + 1);
  const low = Math.min(-1, ...states.map((s) => s.q)), high = Math.max(1, ...states.map((s) => s.q));
  const x = (version) => 40 + (550 * (version - first)) / (end - first);
  const y = (q) => 140 - (130 * (q - low)) / (high - low);
  const points = [];
  for (const state of states) {
    points.push(`${x(state.version)},${y(state.q)}`, `${x(state.until || end)},${y(state.q)}`);
  }
  element("line", { x1: 40, x2: 590, y1: y(0), y2: y(0) });
  element("polyline", { points: points.join(" "), "data-states": states.length });
  element("text", { x: 0, y: y(high) + 4 }, high.toFixed(1));
  element("text", { x: 0, y: y(low) + 4 }, low.toFixed(1));
  element("text", { x: 40, y: 157 }, `version ${first}`);
  element("text", { x: 590, y: 157, "text-anchor": "end" }, `${end - 1}`);
}

async function versions() {
  const found = await get("versions", { limit: PAGE });
  $("versions").replaceChildren();
  for (const { version, why, ...counts } of found.versions) {
    const row = $("versions").insertRow();
    cell(row, version, true);
    const what = Object.entries(counts).map(([name, count]) => `${name} ${count}`).join(", ");
    cell(row, `${why.split(" ")[0]} ${what}`);
  }
}

async function compare() {
  const found = await get("diff", { a: $("a").value, b: $("b").value });
  $("diff").replaceChildren();
  const line = (sign, id, q, text) => {
    const row = $("diff").insertRow();
    cell(row, sign);
    link(cell(row, ""), id);
    cell(row, q, true);
    cell(row, text);
  };
  for (const one of found.added) line("+", one.id, short(one.q), one.task);
  for (const one of found.removed) line("−", one.id, short(one.q), one.task);
  for (const one of found.changed) line("~", one.id, `${short(one.q[0])} → ${short(one.q[1])}`, one.task);
  const left = Object.values(found.more).reduce((sum, count) => sum + count, 0);
  if (!$("diff").rows.length) $("message").textContent = "nothing has changed between these versions";
  else if (left) $("message").textContent = `${left} more are not shown`;
}

async function safely(act) {
  $("message").textContent = "";
  try {
    await act();
  } catch (error) {
    $("message").textContent = error.message;
  }
  document.body.dataset.ready = String(Number(document.body.dataset.ready || 0) + 1);
}

const submit = (id, act) => $(id).addEventListener("submit", (event) => {
  event.preventDefault();
  safely(act);
});
submit("search", () => { offset = 0; return list(); });
submit("compare", compare);
submit("login", async () => {
  key = $("key").value.trim();
  sessionStorage.setItem("key", key);
  $("key").value = "";
  await list();
  await versions();
});
$("more").addEventListener("click", () => safely(() => { offset += PAGE; return list(); }));
$("back").addEventListener("click", () => safely(() => { offset = Math.max(0, offset - PAGE); return list(); }));
safely(async () => { await list(); await versions(); });
