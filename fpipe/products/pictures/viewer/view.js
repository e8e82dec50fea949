// What the page does: the window in time, hovering, choosing, searching, keys. Painting is left to paint.js.

const $ = (id) => document.getElementById(id);
let raw = null;
const state = {
  scenes: [], total: 1, from: 0, to: 1, scroll: 0, memory: true, difference: true, critical: false, messages: false, byRank: false,
  hover: null, chosen: null, matches: null, dense: false, found: [], at: -1, rows: [], height: 0, searches: 0, loads: 0,
};
const lanes = $("lanes"), map = $("map"), tip = $("tip"), query = $("query");
let view = null, mapView = null, waiting = false, mouse = null;

// Show these timelines; `keep` the window in time where it is.
function load(next, keep = false) {
  raw = next;
  WORDS = raw.words;
  IDLE = raw.idle;
  const share = keep ? [state.from / state.total, state.to / state.total] : [0, 1];
  Object.assign(state, {scenes: raw.scenes, hover: null, matches: null, found: [], at: -1, loads: state.loads + 1});
  if (!keep) Object.assign(state, raw.show, {scroll: 0});
  state.total = Math.max(...raw.scenes.map((scene) => scene.total)) || 1;
  [state.from, state.to] = share.map((part) => part * state.total);
  head();
  choose(null);
  search();
  paintNow();
}

function draw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    paintNow();
  });
}

function paintNow() {
  if (!state.scenes.length) return;
  const figures = state.scenes.some(({varies}) => varies.bubble || varies.peak);
  GUTTER = wideScreen() ? (state.byRank ? 204 : figures ? 172 : 84) : 46;
  const placed = arrange(state, lanes.clientHeight);
  state.rows = placed.rows;
  state.height = placed.height;
  state.scroll = clamp(state.scroll, 0, Math.max(0, placed.height - (lanes.clientHeight - AXIS)));
  mapView = paintMap(map, state);
  view = paintLanes(lanes, state);
  const {dense} = view, shown = `${dense} ${state.form}`;  // what the legend explains
  if (shown !== state.shown) {
    Object.assign(state, {dense, shown});
    legend();
    if (!state.chosen) hint();
  }
  if (mouse && !drag) hover(mouse.x, mouse.y, false);  // the box follows what is under the mouse
}

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

// ---- the window in time ---------------------------------------------------------------------------------------------
function show(from, to) {
  const least = state.total / 1e7;
  const length = clamp(to - from, least, state.total);
  from = clamp(from, 0, state.total - length);
  state.from = from;
  state.to = from + length;
  draw();
}

function zoom(factor, centre = (state.from + state.to) / 2) {
  const length = clamp((state.to - state.from) / factor, state.total / 1e7, state.total);
  const share = (centre - state.from) / (state.to - state.from);
  show(centre - share * length, centre + (1 - share) * length);
}

function pan(time) {
  show(state.from + time, state.to + time);
}

function bring(place, close) {
  const lane = state.scenes[place.scene].lanes[place.rank];
  const a = lane.start[place.index], b = lane.end[place.index];
  let length = state.to - state.from;
  if (close) length = Math.min(length, Math.max((b - a) * 14, state.total / 1e7));
  if (close || a < state.from || b > state.to) show((a + b - length) / 2, (a + b + length) / 2);
  const row = state.rows.find((r) => r.lane === lane);
  const high = lanes.clientHeight - AXIS;
  if (row && (row.y < state.scroll || row.y + row.height > state.scroll + high)) state.scroll = row.y - high / 2;
  draw();
}

// ---- under the mouse ------------------------------------------------------------------------------------------------
function placeAt(x, y) {
  if (!view || x < view.left || x > view.left + view.width || y < view.top) return null;
  const row = state.rows.find((r) => r.lane && y - view.top + state.scroll >= r.y && y - view.top + state.scroll < r.y + r.height);
  if (!row) return null;
  const time = state.from + (x - view.left) / view.scale;
  const onCurve = row.curve > 0 && y - view.top + state.scroll > row.y + row.bar;
  return {scene: row.scene, rank: row.rank, time, onCurve, ...barAt(row.lane, time)};
}

function hover(x, y, repaint = true) {
  const place = placeAt(x, y);
  const was = state.hover;
  state.hover = place && place.index >= 0 && !place.onCurve ? place : null;
  lanes.style.cursor = state.hover ? "pointer" : "";
  if (!place || !wideScreen()) tip.hidden = true;
  else tell(place, x, y);
  if (repaint && ((was && was.index) !== (state.hover && state.hover.index) || (was && was.rank) !== (state.hover && state.hover.rank)
    || (was && was.scene) !== (state.hover && state.hover.scene))) draw();
}

function tell(place, x, y) {
  const scene = state.scenes[place.scene], lane = scene.lanes[place.rank];
  let lines;
  if (place.onCurve) lines = [["", `rank ${place.rank} holds ${held(heldAt(lane, place.time), scene)}`],
    ["faint", `at ${time(place.time, scene)}; at most ${held(lane.peak, scene)}`]];
  else if (place.index >= 0) lines = describe(state.scenes, place.scene, place.rank, place.index);
  else lines = describeIdle(scene, lane, place.time, place.next);
  tip.replaceChildren(...lines.map(([kind, text], k) => element(k ? "p" : "h2", text, kind)));
  tip.hidden = false;
  const width = tip.offsetWidth, height = tip.offsetHeight;
  tip.style.left = `${x + 16 + width > lanes.clientWidth ? Math.max(x - width - 12, 4) : x + 16}px`;
  tip.style.top = `${y + 18 + height > lanes.clientHeight ? Math.max(y - height - 10, 4) : y + 18}px`;
}

function element(tag, text, kind = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

// ---- the chosen action ----------------------------------------------------------------------------------------------
function choose(place) {
  state.chosen = place;
  const row = $("chosen");
  if (!place) {
    hint();
  } else {
    const lines = describe(state.scenes, place.scene, place.rank, place.index);
    row.replaceChildren(...lines.map(([kind, text], k) => element(k ? "span" : "b", text, kind)));
    if (state.scenes[place.scene].lanes[place.rank].cause.has(place.index)) {
      const button = element("button", "go there (w)");
      button.onclick = follow;
      row.children[0].after(button);
    }
  }
  draw();
}

function hint() {
  const numbers = state.dense || state.form === 3 ? "zoom in for the numbers of microbatches; " : "";
  const text = `Click or tap an action to choose it; ${numbers}? explains the rest.`;
  $("chosen").replaceChildren(element("span", text, "faint"));
}

function follow() {
  if (!state.chosen) return;
  const cause = state.scenes[state.chosen.scene].lanes[state.chosen.rank].cause.get(state.chosen.index);
  if (!cause) return;
  const place = {scene: state.chosen.scene, rank: cause.rank, index: cause.index};
  choose(place);
  bring(place, false);
}

function step(by) {
  const place = state.chosen || {scene: 0, rank: 0, index: by > 0 ? -1 : 0};
  const count = state.scenes[place.scene].lanes[place.rank].names.length;
  if (!count) return;
  const next = {scene: place.scene, rank: place.rank, index: clamp(place.index + by, 0, count - 1)};
  choose(next);
  bring(next, false);
}

// ---- search ---------------------------------------------------------------------------------------------------------
function search() {
  const text = query.value;
  state.found = text.trim() ? find(state.scenes, text) || [] : [];
  state.at = -1;
  state.searches += 1;
  state.matches = null;
  const known = text.trim() ? find(state.scenes, text) !== null : true;
  if (state.found.length) {
    state.matches = new Map();
    for (const {scene, rank, index} of state.found) {
      const lane = state.scenes[scene].lanes[rank];
      if (!state.matches.has(lane)) state.matches.set(lane, new Set());
      state.matches.get(lane).add(index);
    }
  }
  $("found").textContent = !text.trim() ? "" : state.found.length ? `${state.found.length} found` : known ? "none" : "like 3F2";
  draw();
}

function next(by) {
  const count = state.found.length;
  if (!count) return;
  state.at = (state.at + by + (state.at < 0 && by < 0 ? 1 : 0) + count) % count;
  $("found").textContent = `${state.at + 1} of ${count}`;
  choose(state.found[state.at]);
  bring(state.found[state.at], true);
}

// ---- keys, buttons, mouse -------------------------------------------------------------------------------------------
function toggle(name) {
  if (name === "byRank" && state.scenes.length < 2) return;
  if (name === "difference") {
    if ($("shifts").hidden) return;
    recolour(state.scenes);
    state.loads += 1;  // for the overview
  }
  state[name] = !state[name];
  pressed();
  draw();
}

function pressed() {
  for (const [id, name] of [["memory", "memory"], ["group", "byRank"], ["critical", "critical"], ["messages", "messages"], ["shifts", "difference"]]) {
    $(id).setAttribute("aria-pressed", state[name]);
  }
  legend();
}

function help(open = $("help").hidden) {
  $("help").hidden = !open;
  $("ask").setAttribute("aria-expanded", open);
}

function letGo() {
  help(false);
  query.value = "";
  search();
  choose(null);
  query.blur();
}

const KEYS = {
  ArrowLeft: (event) => pan((state.from - state.to) * (event.shiftKey ? 1 : 0.2)),
  ArrowRight: (event) => pan((state.to - state.from) * (event.shiftKey ? 1 : 0.2)),
  ArrowUp: () => { state.scroll -= 60; draw(); },
  ArrowDown: () => { state.scroll += 60; draw(); },
  "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5), _: () => zoom(1 / 1.5),
  0: () => show(0, state.total), "/": () => query.focus(), "?": () => help(),
  d: () => toggle("difference"), m: () => toggle("memory"), c: () => toggle("critical"), e: () => toggle("messages"), g: () => toggle("byRank"), w: follow, "[": () => step(-1), "]": () => step(1), Escape: letGo,
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target !== query && event.target.closest("#controls")) return;
  if (event.target === query) {
    if (event.key === "Enter") next(event.shiftKey ? -1 : 1);
    else if (event.key === "Escape") letGo();
    else return;
  } else if (Object.hasOwn(KEYS, event.key)) {
    if (event.target.tagName === "BUTTON" && event.key === " ") return;
    KEYS[event.key](event);
  } else {
    return;
  }
  event.preventDefault();
});

query.addEventListener("input", search);
$("closer").onclick = () => zoom(1.5);
$("wider").onclick = () => zoom(1 / 1.5);
$("fit").onclick = () => show(0, state.total);
$("shifts").onclick = () => toggle("difference");
$("memory").onclick = () => toggle("memory");
$("critical").onclick = () => toggle("critical");
$("messages").onclick = () => toggle("messages");
$("group").onclick = () => toggle("byRank");
$("ask").onclick = () => help();

lanes.addEventListener("wheel", (event) => {
  event.preventDefault();
  const {offsetX: x, deltaX, deltaY} = event;
  if (event.shiftKey || Math.abs(deltaX) > Math.abs(deltaY)) pan(((deltaX || deltaY) / view.width) * (state.to - state.from));
  else if (x < view.left) { state.scroll += deltaY; draw(); }
  else zoom(Math.exp(-clamp(deltaY, -120, 120) / 300), state.from + (x - view.left) / view.scale);
}, {passive: false});

let drag = null;
const fingers = new Map();  // pointer id -> x, to zoom with two of them
lanes.addEventListener("pointerdown", (event) => {
  fingers.set(event.pointerId, event.clientX);
  drag = {x: event.clientX, y: event.clientY, from: state.from, scroll: state.scroll, moved: fingers.size > 1};
  lanes.setPointerCapture(event.pointerId);
});
lanes.addEventListener("pointermove", (event) => {
  mouse = event.pointerType === "touch" ? null : {x: event.offsetX, y: event.offsetY};
  if (!drag) return hover(event.offsetX, event.offsetY);
  if (fingers.size === 2) return pinch(event);
  const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
  if (Math.abs(dx) + Math.abs(dy) > 4) drag.moved = true;
  if (!drag.moved) return;
  tip.hidden = true;
  lanes.classList.add("dragging");
  state.scroll = drag.scroll - dy;
  const length = state.to - state.from, from = drag.from - dx / view.scale;
  show(from, from + length);
});
function pinch(event) {
  const [a, b] = fingers.values(), before = Math.abs(a - b);
  fingers.set(event.pointerId, event.clientX);
  const [c, d] = fingers.values(), centre = (c + d) / 2 - lanes.getBoundingClientRect().left - view.left;
  if (before > 8 && Math.abs(c - d) > 8) zoom(Math.abs(c - d) / before, state.from + centre / view.scale);
}
function release(event) {
  fingers.delete(event.pointerId);
  const click = drag && !drag.moved && event.type === "pointerup";
  if (!fingers.size) drag = null;
  lanes.classList.remove("dragging");
  if (!click) return;
  const place = placeAt(event.offsetX, event.offsetY);
  choose(place && place.index >= 0 && !place.onCurve ? place : null);
}
lanes.addEventListener("pointerup", release);
lanes.addEventListener("pointercancel", release);
lanes.addEventListener("pointerleave", () => { mouse = null; if (!drag) { tip.hidden = true; state.hover = null; draw(); } });
lanes.addEventListener("dblclick", (event) => {
  const place = placeAt(event.offsetX, event.offsetY);
  if (place && place.index >= 0) bring(place, true);
});

let mapDrag = false;
const centreOn = (x) => {
  const length = state.to - state.from, centre = (x - mapView.left) / mapView.scale;
  show(centre - length / 2, centre + length / 2);
};
map.addEventListener("pointerdown", (event) => { mapDrag = true; map.setPointerCapture(event.pointerId); centreOn(event.offsetX); });
map.addEventListener("pointermove", (event) => { if (mapDrag) centreOn(event.offsetX); });
map.addEventListener("pointerup", () => { mapDrag = false; });

// ---- the page around the canvas -------------------------------------------------------------------------------------
function head() {
  $("figures").replaceChildren(...state.scenes.map((scene) => {
    const line = document.createElement("div");
    const [name, sizes] = scene.title.split(/(?=: \d+ ranks?, )/), title = element("h1", name);
    if (sizes) title.append(element("i", sizes));
    if (scene.tints?.length) line.className = "compared";
    line.append(title, " ");
    for (const [word, value] of scene.figures) {
      const span = element("span", word + " ");
      span.append(element("b", value));
      line.append(span, " ");
    }
    line.classList.toggle("lines", scene.notes.length > 3);  // of a profile: one sentence a line
    for (const note of scene.notes) line.insertAdjacentHTML("beforeend", `<p>${note}</p>`);
    return line;
  }));
  $("group").hidden = state.scenes.length < 2;
  $("shifts").hidden = !state.scenes.some((scene) => scene.tints?.length);
  pressed();
}

$("more").addEventListener("click", () => {
  $("more").setAttribute("aria-expanded", document.body.classList.toggle("more"));
  paintNow();
});

// Swatches with a word: kinds of work with their shades, causes of idle time, curves and lines that are shown.
function legend() {
  const {scenes} = state, items = [];
  const plain = scenes.filter((scene) => !scene.tints?.length);
  const widest = plain.reduce((a, b) => b.shades > a.shades ? b : a);
  const paler = [];
  const swatch = (colours, kind, word) => {
    const span = document.createElement("span"), box = element("i", "", kind);
    for (const [colour, ink, letter] of colours) {
      const cell = element("b", letter);
      cell.style.background = colour;
      cell.style.color = ink;
      box.append(cell);
    }
    span.append(box, element("span", word));
    items.push(span);
  };
  if (plain.length < scenes.length) items.push(element("span", `${plain[0].label}:`));
  for (const op of "FBIW") {
    if (!scenes.some((scene) => scene.ops.includes(op))) continue;
    if (!plain.some((scene) => scene.ops.includes(op))) continue;  // in the colours of a difference
    const scene = widest.ops.includes(op) ? widest : plain.find((one) => one.ops.includes(op));
    const [entry, ...others] = scene.keys.filter((one) => one.key[0] === op).map(paintOf).map(({colour, ink}) => [colour, ink, op]);
    swatch([entry], "", WORDS[op]);
    paler.push(...others.slice(0, 1));
  }
  const [which, ...more] = new Set(plain.filter((scene) => scene.shades > 1).map((scene) => scene.paler));
  if (paler.length) swatch(paler, "", more.length ? "paler: other stages" : which);
  const name = ["1F0: F of microbatch 0 on stage 1", "1F over 0: F of microbatch 0 on stage 1", scenes[0].letters ? "F0: F of microbatch 0" : "0: microbatch"][state.form];
  if (plain.some((scene) => scene.fused)) swatch(["F", "B"].map((op) => [shadeOf(plain.find((one) => one.fused), op), "", ""]), "fused", "fused");
  const tints = new Map();  // by meaning: all scenes have one scale
  for (const scene of scenes) for (const [[key = ""], word] of scene.tints ?? []) tints.set(word, [key, scene]);
  for (const [word, [key, scene]] of [...tints].sort(([, [a]], [, [b]]) => (a < b ? -1 : 1))) {
    if (key) swatch([[shadeOf(scene, key), "", ""]], "", word);
    else items.push(element("span", "", "break"), element("span", word));
  }
  if (tints.size) items.push(element("span", "", "break"));
  for (const [cause, word] of Object.entries(IDLE)) {
    if (scenes.some((scene) => scene.used.has(cause))) swatch([[theme[cause], "", ""]], "", `idle: ${word}`);
  }
  if (state.memory && scenes.some((scene) => scene.lanes.some((lane) => lane.held.length))) swatch([[theme.curve + "73", "", ""]], "band", "memory held");
  if (state.critical) swatch([[theme.mark, "", ""]], "line", "critical path");
  if (state.messages) swatch([[theme["message-line"], "", ""]], "line", "message");
  if (tints.size) items.push(element("span", "", "break"));
  const say = (text) => items.push(element("span", text));
  if (tints.size && !state.dense && state.form < 3) say("letters:");
  if (name && !state.dense) say(scenes[0].slices > 1 ? "0.1: slice 1 of microbatch 0" : name);
  if (state.dense) say("height: share of the time");
  for (const op of state.form === 2 && !state.dense ? "FBIW" : "") {  // letters of boxes whose colours are those of a difference
    if (scenes.some((scene) => scene.ops.includes(op)) && !plain.some((scene) => scene.ops.includes(op))) say(`${op} ${WORDS[op]}`);
  }
  if (state.form === 2 && !state.dense && scenes.some((scene) => scene.small)) say("small letters: a rank's other stage");
  $("legend").replaceChildren(...items);
}

$("keys").open = !matchMedia("(pointer: coarse)").matches;
new ResizeObserver(draw).observe($("stage"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readTheme(); legend(); draw(); });
readTheme();

if (typeof DecompressionStream === "undefined") document.body.textContent = "This page needs a browser of 2023 or later.";
const text = $("data").textContent;
const contents = text[0] === "{" ? JSON.parse(text) : await inflate(text);  // a short one is painted before the page has loaded
if (contents.scenes) load(unpack(contents));  // else a script that follows has other contents

// For scripts and tests: where an action stands on the page, and what is shown.
window.fpipe = {
  state, criticalPath, messagesOf, paint: paintNow, find: (text) => find(state.scenes, text),
  where: (place) => {
    paintNow();
    const box = boxOf(place, view, state), at = lanes.getBoundingClientRect();
    return box && {x: at.left + box.x + box.width / 2, y: at.top + box.y + box.height / 2, width: box.width};
  },
};
