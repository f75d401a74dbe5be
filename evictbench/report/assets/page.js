"use strict";
// Sorting and filtering the leaderboard, and the sample browser. Texts go into the page as text, never as HTML.

const board = document.getElementById("board");
const body = board.tBodies[0];
const heads = [...board.tHead.rows[0].cells];
const filters = document.getElementById("filters");

function sortBy(column) {
  const head = heads[column];
  const down = head.classList.contains("number") ? head.ariaSort !== "descending" : head.ariaSort === "ascending";
  heads.forEach((other) => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const number = head.classList.contains("number");
  const keyed = [...body.rows].map((row) => [row.cells[column].dataset.value, row]);
  keyed.sort(([a], [b]) => {
    if (a === "" || b === "") return (a === "") - (b === ""); // what is missing comes last either way
    const order = number ? a - b : a.localeCompare(b, "en", { numeric: true });
    return down ? -order : order;
  });
  body.append(...keyed.map(([, row]) => row));
}

function filter() {
  const { suite, model, budget, task, policy, all } = filters.elements;
  const part = policy.value.trim().toLowerCase();
  let shown = 0;
  for (const row of body.rows) {
    const of = row.dataset;
    const whole = "whole" in of;
    const right =
      (!suite.value || of.suite === suite.value) &&
      (!model.value || of.model === model.value) &&
      (!budget.value || of.budget === budget.value) &&
      (task.value === "" ? whole : task.value === "*" ? !of.task.startsWith("mean of ") : `task ${of.task}` === task.value) &&
      of.policy.toLowerCase().includes(part);
    row.hidden = !right;
    shown += right;
  }
  board.classList.toggle("all", all.checked);
  // A column that says nothing about these rows only takes room.
  const visible = [...body.rows].filter((row) => !row.hidden);
  heads.forEach((head, column) => {
    const empty = visible.length > 0 && visible.every((row) => row.cells[column].textContent === "");
    for (const row of [board.tHead.rows[0], ...body.rows]) row.cells[column].hidden = empty;
  });
  document.getElementById("count").textContent = `${shown} of ${body.rows.length} rows`;
}

heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => sortBy(column)));
filters.addEventListener("input", filter);
filters.addEventListener("change", filter);
filters.addEventListener("submit", (event) => event.preventDefault());
filter();

// The sample browser.

const browse = document.getElementById("browse");
const place = document.getElementById("sample");
const packs = new Map();
let pack = null;

async function unpack(number) {
  if (!packs.has(number)) {
    const text = document.querySelector(`script[data-pack="${number}"]`).textContent;
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    packs.set(number, await new Response(stream).json());
  }
  return packs.get(number);
}

function make(name, content, kind) {
  const element = document.createElement(name);
  if (kind) element.className = kind;
  for (const part of [content].flat()) if (part !== undefined && part !== null) element.append(part);
  return element;
}

function texts(text) {
  if (!Array.isArray(text)) return [text];
  return [text[0], make("span", `\n[${text[1].toLocaleString("en")} letters left out]\n`, "left-out"), text[2]];
}

function box(text, label) {
  const found = make("pre", texts(text));
  found.tabIndex = 0;
  found.setAttribute("role", "region");
  found.setAttribute("aria-label", label);
  return found;
}

const percent = (share) => `${Math.round(1000 * share) / 10}`;
const short = (number) => (Number.isInteger(number) ? number.toLocaleString("en") : Number(number.toPrecision(4)).toString());

function facts(sample) {
  const list = make("dl");
  const say = (name, value) => list.append(make("dt", name), make("dd", value));
  for (const [name, value] of Object.entries(sample.metrics ?? {})) {
    if (name !== "score" && typeof value === "number") say(name.replaceAll("_", " "), short(value));
  }
  if (sample.answer) say("graded answer", texts(sample.answer));
  const ended = [`${short(sample.out)} of at most ${short(sample.limit)} tokens`];
  if (sample.cut) ended.push("cut off");
  if (sample.loop) ended.push("in a loop");
  if (sample.thinking === "unclosed") ended.push("thought not closed");
  say("answer", ended.join(", "));
  say("cache", `${short(sample.bytes / 1e6)} MB`);
  const seen = sample.prompt + sample.out;
  const gone = seen - sample.most;
  say("entries seen", `at most ${short(sample.most)}, ${short(sample.mean)} on average, of ${short(seen)} tokens`);
  const evicted = [gone > 1 ? `at least ${short(gone)} of ${short(seen)} tokens by the end. ` : "nothing. "];
  if (gone > 1) {
    evicted.push("Which ones is not recorded in a run");
    if (browse.dataset.map) {
      const link = make("a", "retention map");
      link.href = `#${browse.dataset.map}`;
      evicted.push("; the trace in this report has a ", link);
    }
    evicted.push(".");
  }
  say("evicted", evicted);
  return list;
}

function side(number, sample, other) {
  const found = make("div", make("h4", pack.arms[number][1]));
  if (!sample) {
    found.append(make("p", "This run has no answer to this sample."));
    return found;
  }
  const best = other && sample.score !== other.score ? (sample.score > other.score ? "best" : "worst") : "";
  found.append(make("p", ["score ", make("span", percent(sample.score), `score ${best}`)]));
  if (sample.text) found.append(box(sample.text, `Answer under ${pack.arms[number][1]}`));
  else found.append(make("p", "No text: the model said nothing, or the task gave it every token."));
  found.append(facts(sample));
  return found;
}

function show() {
  const { sample, left, right } = browse.elements;
  const index = sample.selectedIndex;
  document.getElementById("previous").disabled = index <= 0;
  document.getElementById("next").disabled = index < 0 || index >= sample.length - 1;
  const chosen = pack.docs[sample.value];
  if (index < 0 || !chosen) {
    place.replaceChildren(make("p", "No sample is like that."));
    return;
  }
  const [context, question, missing] = pack.prompts[chosen.prompt];
  place.replaceChildren(make("h3", `Sample ${chosen.doc}${chosen.repeat ? `, repeat ${chosen.repeat}` : ""}`));
  if (missing) place.append(make("p", missing, "note"));
  else {
    place.append(make("h4", question.length ? "Context, compressed before the question is seen" : "Prompt"));
    place.append(box(context, "Context"));
    if (question.length) place.append(make("h4", "Question"), box(question, "Question"));
  }
  const [a, b] = [chosen.arms[left.value], chosen.arms[right.value]];
  const sides = make("div", side(left.value, a, b), "sides");
  if (left.value !== right.value) sides.append(side(right.value, b, a));
  place.append(sides);
  document.getElementById("said").textContent = `Sample ${index + 1} of ${sample.length}`;
}

function list() {
  const { sample, left, right, show: which } = browse.elements;
  const before = sample.value;
  sample.replaceChildren();
  pack.docs.forEach((document_, number) => {
    const [a, b] = [document_.arms[left.value], document_.arms[right.value]];
    const fits = !which.value || (a && b && (which.value === "differ" ? a.score !== b.score : b.score < a.score));
    if (!fits) return;
    const scores = [a, b].map((one) => (one ? percent(one.score) : "none")).join(" | ");
    sample.append(new Option(`${document_.doc}${document_.repeat ? `, repeat ${document_.repeat}` : ""}: ${scores}`, number));
  });
  if (before && [...sample.options].some((option) => option.value === before)) sample.value = before;
  show();
}

async function open() {
  const { pack: which, left, right } = browse.elements;
  const names = [left, right].map((choice) => choice.selectedOptions[0]?.text);
  try {
    pack = await unpack(which.value);
  } catch (error) {
    place.replaceChildren(make("p", `This browser cannot unpack the samples (${error.message}); a newer one can.`));
    return;
  }
  [left, right].forEach((choice, number) => {
    choice.replaceChildren(...pack.arms.map(([, name], place_) => new Option(name, place_)));
    const kept = pack.arms.findIndex(([, name]) => name === names[number]);
    choice.value = kept >= 0 ? kept : Math.min(number, pack.arms.length - 1);
  });
  list();
}

if (browse) {
  browse.addEventListener("submit", (event) => event.preventDefault());
  browse.addEventListener("change", (event) => {
    if (event.target.name === "pack") open();
    else if (event.target.name === "sample") show();
    else list();
  });
  const step = (by) => () => {
    browse.elements.sample.selectedIndex += by;
    show();
  };
  document.getElementById("previous").addEventListener("click", step(-1));
  document.getElementById("next").addEventListener("click", step(1));
  open();
}
