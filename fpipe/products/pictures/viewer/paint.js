// How the lanes, the axis, the memory curves and the overview are drawn on their canvases. Nothing here reacts.

const AXIS = 26, TITLE = 28, GROUP = 20, LEAST = 8;  // of letters
const CONDENSED = 0.75;  // how much narrower than usual letters may be
let GUTTER = 172;  // left of the lanes; narrow on a phone
const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';
let theme = {};

function readTheme() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue("--" + name).trim();
  const names = ["paper", "ink", "faint", "line", "mark", "curve", "message-line", "warmup", "tail", "imbalance", "message", "other"];
  theme = Object.fromEntries(names.map((name) => [name, read(name)]));
  theme.scheme = read("scheme");
  theme.rgb = (colour) => [1, 3, 5].map((k) => parseInt(colour.slice(k, k + 2), 16));
}

function wideScreen() {
  return window.innerWidth >= 700;
}

// The colour of a palette's entry, and that of letters on it.
function paintOf(entry) {
  return {colour: entry[theme.scheme][0], ink: entry[theme.scheme][1]};
}

// A canvas as large as it is shown, and its pen in CSS pixels.
function penOf(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  return {pen, width, height, ratio};
}

// The rows of the picture from top to bottom, titles and lanes, with their places before scrolling.
function arrange(state, height) {
  const {scenes} = state;
  const order = [];
  if (state.byRank) {
    const ranks = Math.max(...scenes.map((scene) => scene.lanes.length));
    for (let rank = 0; rank < ranks; rank++) {
      order.push({title: `rank ${rank}`, group: true});
      scenes.forEach((scene, s) => { if (scene.lanes[rank]) order.push({lane: scene.lanes[rank], scene: s, rank}); });
      order[order.length - 1].gap = 10;
    }
  } else {
    scenes.forEach((scene, s) => {
      if (scenes.length > 1) order.push({title: scene.label, scene: s});
      scene.lanes.forEach((lane, rank) => order.push({lane, scene: s, rank}));
      order[order.length - 1].gap = 8;
    });
  }
  const lanes = order.filter((row) => row.lane).length;
  const fixed = order.reduce((sum, row) => sum + (row.title ? (row.group ? GROUP : TITLE) : 4 + (row.gap || 0)), 8);
  const least = state.memory ? 30 : 15, most = state.memory ? 88 : 52;
  const each = Math.floor(Math.min(most, Math.max(least, (height - AXIS - fixed) / lanes)));
  let y = 4;
  for (const row of order) {
    row.y = y;
    row.height = row.title ? (row.group ? GROUP : TITLE) : each;
    row.curve = row.lane && state.memory ? Math.round(each * 0.4) : 0;
    row.bar = row.height - row.curve;
    y += row.height + (row.title ? 0 : 4 + (row.gap || 0));
  }
  return {rows: order, height: y + 4};
}

function paintLanes(canvas, state) {
  const {pen, width, height, ratio} = penOf(canvas);
  const view = {left: GUTTER, width: Math.max(width - GUTTER - 12, 10), top: AXIS, ratio};
  view.scale = view.width / (state.to - state.from);
  view.x = (time) => view.left + (time - state.from) * view.scale;
  view.dense = state.scenes.some((scene) => scene.mean * view.scale < 2);  // all lanes alike
  view.step = stepOf(90 / view.scale);
  view.ticks = [];
  for (let k = Math.ceil(state.from / view.step); k * view.step <= state.to; k++) view.ticks.push(k * view.step);
  pen.fillStyle = theme.paper;
  pen.fillRect(0, 0, width, height);
  pen.save();
  pen.beginPath();
  pen.rect(0, view.top, width, height - view.top);
  pen.clip();
  for (const row of state.rows) {
    const y = view.top + row.y - state.scroll;
    if (y > height || y + row.height < view.top) continue;
    if (row.title) paintTitle(pen, row, y, state);
    else paintRow(pen, row, y, view, state);
  }
  pen.beginPath();
  pen.rect(view.left - 2, view.top, view.width + 4, height - view.top);  // what follows is not over the names of ranks
  pen.clip();
  if (state.messages) paintMessages(pen, view, state);
  if (state.critical) paintCritical(pen, view, state);
  if (state.hover) paintOutline(pen, state.hover, view, state, theme.ink, 1.5);
  if (state.chosen) {
    paintCause(pen, state.chosen, view, state);
    paintOutline(pen, state.chosen, view, state, theme.mark, 2.5);
  }
  pen.restore();
  paintAxis(pen, view, state);
  return view;
}

function paintTitle(pen, row, y, state) {
  pen.font = row.group ? `600 12px ${FONT}` : `600 13px ${FONT}`;
  pen.textAlign = "left";
  pen.textBaseline = "middle";
  pen.fillStyle = theme.ink;
  const left = wideScreen() ? 16 : 6;
  pen.fillText(clipped(pen, row.title, pen.canvas.clientWidth - left - 6), left, y + row.height / 2 + (row.group ? 0 : 2));
}

// As much of a text as fits, with dots where it was cut.
function clipped(pen, text, space) {
  if (pen.measureText(text).width <= space) return text;
  let length = text.length;
  while (length > 1 && pen.measureText(text.slice(0, length) + "…").width > space) length--;
  return text.slice(0, length) + "…";
}

function paintLabels(pen, row, y, state) {
  const scene = state.scenes[row.scene], {lane} = row, wide = wideScreen();
  const small = row.bar < 20;
  pen.textBaseline = "middle";
  pen.textAlign = "left";
  pen.font = `${small ? 11 : 12}px ${FONT}`;
  pen.fillStyle = theme.ink;
  const middle = y + row.bar / 2 + 0.5, left = wide ? 16 : 6;
  const name = state.byRank && state.scenes.length > 1 ? scene.label : wide ? `rank ${row.rank}` : String(row.rank);
  const {bubble, peak} = scene.varies;
  pen.fillText(clipped(pen, name, GUTTER - left - (wide && bubble ? 76 : 6)), left, middle);
  if (!wide) return;
  pen.font = `${small ? 10 : 11}px ${FONT}`;
  pen.fillStyle = theme.faint;
  pen.textAlign = "right";
  if (bubble) pen.fillText("bubble " + percent(lane.bubble), GUTTER - 12, middle);
  if (row.curve >= 12 && peak) pen.fillText("peak " + amount(lane.peak, scene), GUTTER - 12, y + row.bar + row.curve / 2);
}

function paintRow(pen, row, y, view, state) {
  const scene = state.scenes[row.scene], {lane} = row;
  paintLabels(pen, row, y, state);
  pen.save();
  pen.beginPath();
  pen.rect(view.left, y - 4, view.width, row.height + 8);
  pen.clip();
  pen.fillStyle = theme.line;
  for (const tick of view.ticks) pen.fillRect(Math.round(view.x(tick)), y - 4, 1, row.height + 8);
  const first = firstAfter(lane, state.from);
  const last = Math.min(firstAfter(lane, state.to), lane.end.length - 1);
  if (view.dense) paintShares(pen, lane, scene, first, last, y, row, view, state);
  else {
    paintIdle(pen, lane, y, row, view, state);
    paintBars(pen, lane, scene, first, last, y, row, view, state);
  }
  if (row.curve) paintCurve(pen, lane, scene, y + row.bar + 1, row.curve - 1, view, state);
  pen.restore();
}

function paintIdle(pen, lane, y, row, view, state) {
  for (const gap of lane.idle) {
    if (gap.end <= state.from || gap.start >= state.to) continue;
    pen.fillStyle = theme[gap.cause];
    pen.fillRect(view.x(gap.start), y, (gap.end - gap.start) * view.scale, row.bar);
  }
}

const widths = new Map();
function widthOf(pen, label) {  // in units of the letters' size
  if (!widths.has(label)) widths.set(label, pen.measureText(label).width / parseFloat(pen.font));
  return widths.get(label);
}

function matchesOf(state, lane) {
  return state.matches ? state.matches.get(lane) || new Set() : null;
}

// How all lanes of the page write names: [form, size of letters]. A wider window never tells less: 3 long bars have the
// microbatch, 2 all have it, 1 stage and op over it, 0 the whole name.
function formOf(pen, state, view, bar) {
  for (const scene of state.scenes) {
    scene.widths ??= [(name) => name, (name) => name.match(/^0+\D/)[0], (name) => name.replace(scene.letters ? /^0+/ : /^0+\D/, "")]
      .map((cut) => Math.max(...scene.forms.map((name) => widthOf(pen, cut(name)))));
  }
  const size = (...cuts) => Math.min(...state.scenes.map((scene) => (scene.cell * view.scale - 3) / Math.max(...cuts.map((cut) => scene.widths[cut]))));
  if (size(0) >= 9) return [0, Math.min(size(0), 11.5, bar - 3)];
  if (size(1, 2) >= 9 && bar >= 28) return [1, 9];
  return [size(2) >= LEAST * CONDENSED ? 2 : 3, Math.min(Math.max(size(2), LEAST), 11.5, bar - 3)];
}

function paintBars(pen, lane, scene, first, last, y, row, view, state) {
  const matches = matchesOf(state, lane);
  pen.font = `10px ${FONT}`;
  pen.textAlign = "center";
  const [form, size] = formOf(pen, state, view, row.bar);
  state.form = form;
  let now = 10;
  const write = (text, letters, x, y, space) => {
    if (letters !== now) pen.font = `${now = letters}px ${FONT}`;
    pen.fillText(text, x, y, space);  // condensed where it is wider than that
  };
  for (let k = first; k <= last; k++) {
    const a = view.x(lane.start[k]), b = view.x(lane.end[k]);
    const wide = b - a > 3 ? b - a - 1 : Math.max(b - a, 0.6);
    const dim = matches && !matches.has(k);
    const count = lane.names[k].includes(";") ? 2 : 1;
    for (let p = 0; p < count; p++) {
      const paint = paintOf(scene.palette[lane.colour[2 * k + p]]);
      const top = y + (p * row.bar) / count, high = row.bar / count;
      pen.fillStyle = paint.colour;
      pen.globalAlpha = dim ? 0.22 : 1;
      pen.fillRect(a, top, wide, high);
      if (wide < 5 || high < 9) continue;
      const part = partsOf(lane, k)[p], head = part.stage + part.op, letters = Math.min(size, high);
      const space = Math.min(a + wide, view.left + view.width) - Math.max(a, view.left) - 2;  // names of neighbours do not touch
      const fits = (text) => space >= CONDENSED * letters * widthOf(pen, text);
      const middle = (Math.max(a, view.left) + Math.min(b, view.left + view.width)) / 2, half = top + high / 2;
      pen.fillStyle = dim ? theme.ink : paint.ink;
      pen.globalAlpha = dim ? 0.6 : 1;
      if (form === 1 && high >= 28 && fits(head) && fits(part.microbatch)) {
        write(head, 9, middle, half - 6, space);
        write(part.microbatch, 9, middle, half + 6, space);
      } else if (form < 2 && fits(part.name)) {
        write(part.name, letters, middle, half + 0.5, space);
      } else {  // a shorter bar than others
        const number = form === 2 ? letters : Math.min(11.5, high, space / CONDENSED / scene.widths[2]);
        if (number >= LEAST && fits(part.short) && (form < 3 || state.scenes.length === 1)) write(part.short, number, middle, half + 0.5, space);
      }
    }
  }
  pen.globalAlpha = 1;
}

const KINDS = [...[..."0123456789"].map((k) => "t" + k), "F", "B", "I", "W", "tail", "imbalance", "message", "other", "warmup"];  // in a lane, from its foot up

// Where bars are too narrow: in pieces as long as a rank's work on some microbatches, the share of each kind of work.
function paintShares(pen, lane, scene, first, last, y, row, view, state) {
  const {low, count, shares, add} = pieces(scene, view, state);
  if (count <= 0) return;
  const matches = matchesOf(state, lane), marked = [];
  addLane(lane, scene, Math.max(first - 1, 0), last, add, state);
  for (let k = first; k <= last && matches; k++) {
    if (matches.has(k)) marked.push(view.x(lane.start[k]), view.x(lane.end[k]));
  }
  pen.globalAlpha = matches ? 0.3 : 1;
  paintStacks(pen, shares, count, low, scene, view, y, row.bar);
  pen.globalAlpha = 1;
  pen.fillStyle = theme.mark;
  for (let m = 0; m < marked.length; m += 2) pen.fillRect(marked[m], y, Math.max(marked[m + 1] - marked[m], 1.5), row.bar);
}

// The pieces of a window: the first one, how many, the shares of each kind in them, and a function that adds a time.
function pieces(scene, view, state, weight = 1) {
  const step = scene.each > 0 && scene.each * view.scale < 24 ? scene.each * Math.ceil(6 / (scene.each * view.scale)) : 6 / view.scale;
  const low = Math.floor(state.from / step), count = Math.ceil(Math.min(state.to, scene.total) / step) - low;
  const shares = new Float64Array(KINDS.length * Math.max(count, 0));
  const add = (start, end, kind) => {
    for (let c = Math.max(Math.floor(start / step) - low, 0); c < count && (c + low) * step < end; c++) {
      const inside = Math.min(end, (c + low + 1) * step, scene.total) - Math.max(start, (c + low) * step);
      const whole = Math.min((c + low + 1) * step, scene.total) - (c + low) * step;
      if (inside > 0) shares[c * KINDS.length + kind] += (weight * inside) / whole;
    }
  };
  view.step_ = step;
  return {low, count, shares, add};
}

function addLane(lane, scene, first, last, add, state) {
  const kinds = scene.palette.map((entry) => KINDS.findIndex((kind) => kind === entry.key || kind === entry.key[0]));
  for (let k = first; k <= last; k++) {
    const a = lane.start[k], b = lane.end[k], one = kinds[lane.colour[2 * k]], two = kinds[lane.colour[2 * k + 1]];
    if (one === two) add(a, b, one);
    else { add(a, (a + b) / 2, one); add((a + b) / 2, b, two); }
  }
  for (const gap of lane.idle) if (gap.end > state.from && gap.start < state.to) add(gap.start, gap.end, KINDS.indexOf(gap.cause));
}

function shadeOf(scene, op) {
  const entry = scene.palette.find((one) => one.key === op || one.key[0] === op);
  return entry ? paintOf(entry).colour : "";
}

// Pieces of shares over one another; equal neighbours are one rectangle.
function paintStacks(pen, shares, count, low, scene, view, y, height) {
  const colours = KINDS.map((kind) => theme[kind] ?? shadeOf(scene, kind)), step = view.step_, kinds = KINDS.length;
  const x = (c) => Math.round(view.x(Math.min((c + low) * step, scene.total)));
  const under = new Float64Array(count);
  for (let kind = 0; kind < kinds; kind++) {
    let from = 0, foot = -1, top = -1;
    const flush = (c) => {
      if (top > foot) pen.fillRect(x(from), y + height - top, x(c) - x(from), top - foot);
    };
    pen.fillStyle = colours[kind];
    for (let c = 0; c < count; c++) {
      const a = Math.round(2 * height * under[c]) / 2;
      const b = Math.round(2 * height * Math.min((under[c] += shares[c * kinds + kind]), 1)) / 2;
      if (a !== foot || b !== top) { flush(c); from = c; foot = a; top = b; }
    }
    flush(count);
  }
}

// For the overview of few lanes: each column is the mean of what ran in it.
const strip = document.createElement("canvas");
function paintMeans(pen, lane, scene, y, height, view, state) {
  const columns = Math.max(1, Math.round(view.width));
  const sums = new Float32Array(4 * columns), matches = matchesOf(state, lane);
  const shades = scene.palette.map((entry) => theme.rgb(paintOf(entry).colour)), mark = theme.rgb(theme.mark);
  const add = (start, end, one, two) => {
    const a = start * view.scale, b = Math.min(end * view.scale, columns);
    for (let x = Math.floor(a); x < b && x < columns; x++) {
      const share = Math.min(b, x + 1) - Math.max(a, x);
      for (let c = 0; c < 3; c++) sums[4 * x + c] += share * (one[c] + two[c]) / 2;
      sums[4 * x + 3] += share;
    }
  };
  for (let k = 0; k < lane.end.length; k++) {
    const found = matches && matches.has(k);
    add(lane.start[k], lane.end[k], found ? mark : shades[lane.colour[2 * k]], found ? mark : shades[lane.colour[2 * k + 1]]);
  }
  for (const gap of lane.idle) { const tint = theme.rgb(theme[gap.cause]); add(gap.start, gap.end, tint, tint); }
  strip.width = columns;
  strip.height = 1;
  const ink = strip.getContext("2d"), image = ink.createImageData(columns, 1);
  for (let x = 0; x < columns; x++) {
    const share = sums[4 * x + 3] || 1;
    for (let c = 0; c < 3; c++) image.data[4 * x + c] = sums[4 * x + c] / share;
    image.data[4 * x + 3] = sums[4 * x + 3] > 0 ? 255 : 0;
  }
  ink.putImageData(image, 0, 0);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(strip, 0, 0, columns, 1, view.left, y, columns, height);
}

function paintCurve(pen, lane, scene, y, height, view, state) {
  const {times, held: amounts} = lane;
  if (!times.length) return;
  const up = (amount) => y + height - (height - 2) * Math.max(amount, 0) / scene.most;
  pen.beginPath();
  let last = NaN, before = 0, k = 0;
  while (k < times.length && times[k] <= state.from) before = amounts[k++];
  const start = Math.max(view.left, view.x(times[0]));
  pen.moveTo(start, y + height);
  pen.lineTo(start, up(before));
  for (; k < times.length && times[k] <= state.to; k++) {
    const x = view.x(times[k]);
    if (x - last < 0.3 && amounts[k] <= before) { before = amounts[k]; continue; }  // keep the peaks of dense curves
    pen.lineTo(x, up(before));
    pen.lineTo(x, up(before = amounts[k]));
    last = x;
  }
  const end = Math.min(view.left + view.width, view.x(lane.end[lane.end.length - 1]));
  pen.lineTo(end, up(before));
  pen.lineTo(end, y + height);
  pen.closePath();
  pen.globalAlpha = 0.45;
  pen.fillStyle = theme.curve;
  pen.fill();
  pen.globalAlpha = 1;
  pen.strokeStyle = theme.curve;
  pen.lineWidth = 1;
  pen.stroke();
}
