// How the lanes, the axis, the memory curves and the overview are drawn on their canvases. Nothing here reacts.

const GUTTER = 172, AXIS = 26, TITLE = 28;
const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';
let theme = {};

function readTheme() {
  const style = getComputedStyle(document.documentElement);
  theme = Object.fromEntries(["paper", "ink", "faint", "line", "idle", "mark", "curve"].map(
    (name) => [name, style.getPropertyValue("--" + name).trim()]));
  theme.idleRgb = [1, 3, 5].map((k) => parseInt(theme.idle.slice(k, k + 2), 16));
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
      scenes.forEach((scene, s) => { if (scene.lanes[rank]) order.push({lane: scene.lanes[rank], scene: s, rank}); });
      order[order.length - 1].gap = 10;
    }
  } else {
    scenes.forEach((scene, s) => {
      if (scenes.length > 1) order.push({title: scene.title, scene: s});
      scene.lanes.forEach((lane, rank) => order.push({lane, scene: s, rank}));
      order[order.length - 1].gap = 8;
    });
  }
  const lanes = order.filter((row) => row.lane).length;
  const fixed = order.reduce((sum, row) => sum + (row.title ? TITLE : 4 + (row.gap || 0)), 8);
  const least = state.memory ? 30 : 15, most = state.memory ? 88 : 52;
  const each = Math.floor(Math.min(most, Math.max(least, (height - AXIS - fixed) / lanes)));
  let y = 4;
  for (const row of order) {
    row.y = y;
    row.height = row.title ? TITLE : each;
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
  pen.font = `600 13px ${FONT}`;
  pen.textAlign = "left";
  pen.textBaseline = "middle";
  pen.fillStyle = theme.ink;
  pen.fillText(row.title, 16, y + TITLE / 2 + 2);
}

function paintRow(pen, row, y, view, state) {
  const scene = state.scenes[row.scene], {lane} = row;
  const small = row.bar < 20;
  pen.textBaseline = "middle";
  pen.textAlign = "left";
  pen.font = `${small ? 11 : 12}px ${FONT}`;
  pen.fillStyle = theme.ink;
  const middle = y + row.bar / 2 + 0.5;
  const name = state.byRank && state.scenes.length > 1 ? `${row.rank} · ${scene.label}` : `rank ${row.rank}`;
  pen.fillText(name, 16, middle, 88);
  pen.font = `${small ? 10 : 11}px ${FONT}`;
  pen.fillStyle = theme.faint;
  pen.textAlign = "right";
  pen.fillText(percent(lane.bubble), GUTTER - 12, middle);
  if (row.curve >= 12) pen.fillText("peak " + held(lane.peak, scene.memoryUnit), GUTTER - 12, y + row.bar + row.curve / 2);
  pen.save();
  pen.beginPath();
  pen.rect(view.left, y - 4, view.width, row.height + 8);
  pen.clip();
  pen.fillStyle = theme.idle;
  pen.fillRect(view.left, y, view.x(scene.total) - view.left, row.bar);
  pen.fillStyle = theme.line;
  for (const tick of view.ticks) pen.fillRect(Math.round(view.x(tick)), y - 4, 1, row.height + 8);
  const first = firstAfter(lane, state.from);
  let last = firstAfter(lane, state.to);
  last = Math.min(last, lane.end.length - 1);
  if (last - first > view.width / 2.5) paintDense(pen, lane, scene, first, last, y, row, view, state);
  else paintBars(pen, lane, scene, first, last, y, row, view, state);
  if (row.curve) paintCurve(pen, lane, scene, y + row.bar + 1, row.curve - 1, view, state);
  pen.restore();
}

const widths = new Map();
function widthOf(pen, label) {  // in units of the letters' size
  if (!widths.has(label)) widths.set(label, pen.measureText(label).width / parseFloat(pen.font));
  return widths.get(label);
}

function matchesOf(state, lane) {
  return state.matches ? state.matches.get(lane) || new Set() : null;
}

function paintBars(pen, lane, scene, first, last, y, row, view, state) {
  const matches = matchesOf(state, lane);
  const cell = scene.cell * view.scale;
  const detail = cell >= 5 + 11.5 * scene.longest[0] ? 0 : cell >= 3 + 11.5 * scene.longest[1] ? 1 : 2;
  const size = Math.min(11.5, row.bar - 3);
  pen.font = `${size}px ${FONT}`;
  pen.textAlign = "center";
  for (let k = first; k <= last; k++) {
    const a = view.x(lane.start[k]), b = view.x(lane.end[k]);
    const wide = b - a > 3 ? b - a - 1 : Math.max(b - a, 0.6);
    const dim = matches && !matches.has(k);
    pen.globalAlpha = dim ? 0.22 : 1;
    const fused = lane.names[k].includes(";");
    const count = fused ? 2 : 1;
    for (let p = 0; p < count; p++) {
      const paint = scene.palette[lane.colour[2 * k + p]];
      const top = y + (p * row.bar) / count, high = row.bar / count;
      pen.fillStyle = paint.colour;
      pen.fillRect(a, top, wide, high);
      if (wide < 8 || dim || high < 9) continue;
      const part = partsOf(lane, k)[p];
      const label = detail === 0 ? part.name : detail === 1 ? part.op + part.microbatch : part.microbatch;
      const letters = fused ? Math.min(size, high) : size;
      if (widthOf(pen, label) * letters > wide) continue;
      if (fused) pen.font = `${letters}px ${FONT}`;
      pen.fillStyle = paint.ink;
      pen.fillText(label, (Math.max(a, view.left) + Math.min(b, view.left + view.width)) / 2, top + high / 2 + 0.5);
      if (fused) pen.font = `${size}px ${FONT}`;
    }
  }
  pen.globalAlpha = 1;
}

// Where bars are narrower than a few pixels: each column is the mean of what ran in it, matches stand out.
const strip = document.createElement("canvas");
function paintDense(pen, lane, scene, first, last, y, row, view, state) {
  const columns = Math.max(1, Math.round(view.width));
  const sums = new Float32Array(4 * columns);
  const matches = matchesOf(state, lane), marked = [];
  for (let k = first; k <= last; k++) {
    const a = Math.max((lane.start[k] - state.from) * view.scale, 0);
    const b = Math.min((lane.end[k] - state.from) * view.scale, columns);
    if (matches && matches.has(k)) marked.push(a, b);
    const one = scene.palette[lane.colour[2 * k]].rgb, two = scene.palette[lane.colour[2 * k + 1]].rgb;
    for (let x = Math.floor(a); x < b && x < columns; x++) {
      const share = Math.min(b, x + 1) - Math.max(a, x);
      for (let c = 0; c < 3; c++) sums[4 * x + c] += share * (one[c] + two[c]) / 2;
      sums[4 * x + 3] += share;
    }
  }
  strip.width = columns;
  strip.height = 1;
  const ink = strip.getContext("2d"), image = ink.createImageData(columns, 1);
  for (let x = 0; x < columns; x++) {
    const busy = Math.min(sums[4 * x + 3], 1);
    for (let c = 0; c < 3; c++) image.data[4 * x + c] = sums[4 * x + c] + (1 - busy) * theme.idleRgb[c];
    image.data[4 * x + 3] = 255;
  }
  ink.putImageData(image, 0, 0);
  pen.imageSmoothingEnabled = false;
  pen.globalAlpha = matches ? 0.3 : 1;
  const end = Math.min(view.x(scene.total) - view.left, columns);
  if (end > 0) pen.drawImage(strip, 0, 0, end, 1, view.left, y, end, row.bar);
  pen.globalAlpha = 1;
  pen.fillStyle = theme.mark;
  for (let m = 0; m < marked.length; m += 2) pen.fillRect(view.left + marked[m], y, Math.max(marked[m + 1] - marked[m], 1.5), row.bar);
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
  pen.globalAlpha = 0.25;
  pen.fillStyle = theme.curve;
  pen.fill();
  pen.globalAlpha = 1;
  pen.strokeStyle = theme.curve;
  pen.lineWidth = 1;
  pen.stroke();
}

function boxOf(place, view, state) {
  const row = state.rows.find((r) => r.lane && r.scene === place.scene && r.rank === place.rank);
  if (!row) return null;
  const y = view.top + row.y - state.scroll;
  const {lane} = row;
  const a = view.x(lane.start[place.index]), b = view.x(lane.end[place.index]);
  return {x: a, y, width: Math.max(b - a - (b - a > 3 ? 1 : 0), 1), height: row.bar};
}

function paintOutline(pen, place, view, state, colour, thick) {
  const box = boxOf(place, view, state);
  if (!box) return;
  pen.strokeStyle = colour;
  pen.lineWidth = thick;
  pen.strokeRect(box.x, box.y, box.width, box.height);
}

// An arrow from the end of what the chosen action waited for to its start.
function paintCause(pen, place, view, state) {
  const lane = state.scenes[place.scene].lanes[place.rank];
  const cause = lane.cause.get(place.index);
  if (!cause) return;
  const to = boxOf(place, view, state), from = boxOf({...cause, scene: place.scene}, view, state);
  if (!to || !from) return;
  const x0 = from.x + from.width, y0 = from.y + from.height / 2, x1 = to.x, y1 = to.y + to.height / 2;
  const bend = Math.max(24, Math.abs(x1 - x0) / 2);
  pen.strokeStyle = pen.fillStyle = theme.mark;
  pen.lineWidth = 2;
  pen.setLineDash([5, 3]);
  pen.strokeRect(from.x, from.y, from.width, from.height);
  pen.setLineDash([]);
  pen.beginPath();
  pen.moveTo(x0, y0);
  pen.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1 - 6, y1);
  pen.stroke();
  pen.beginPath();
  pen.moveTo(x1, y1);
  pen.lineTo(x1 - 9, y1 - 5);
  pen.lineTo(x1 - 9, y1 + 5);
  pen.fill();
}

function stepOf(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find((k) => power * k >= least * (1 - 1e-9));
}

function paintAxis(pen, view, state) {
  pen.fillStyle = theme.paper;
  pen.fillRect(0, 0, view.left + view.width + 12, AXIS);
  pen.font = `11px ${FONT}`;
  pen.textBaseline = "middle";
  pen.textAlign = "center";
  const digits = Math.max(0, -Math.floor(Math.log10(view.step) + 1e-9));
  pen.fillStyle = theme.line;
  for (const tick of view.ticks) pen.fillRect(Math.round(view.x(tick)), AXIS - 5, 1, 6);
  pen.fillStyle = theme.faint;
  for (const tick of view.ticks) pen.fillText(tick.toFixed(digits), view.x(tick), AXIS / 2 - 1);
  pen.textAlign = "right";
  pen.fillText((state.scenes[0].unit ? `in ${state.scenes[0].unit}, ` : "") + "bubble", GUTTER - 12, AXIS / 2 - 1);
}

// The overview: all lanes, thin, drawn once, and the window over them.
const overview = {canvas: document.createElement("canvas"), key: null};
function paintMap(canvas, state) {
  const {pen, width, height, ratio} = penOf(canvas);
  const view = {left: GUTTER, width: Math.max(width - GUTTER - 12, 10), ratio};
  view.scale = view.width / state.total;
  view.x = (time) => view.left + time * view.scale;
  const key = [width, height, ratio, theme.paper, state.searches].join();
  if (overview.key !== key) {
    overview.key = key;
    overview.canvas.width = canvas.width;
    overview.canvas.height = canvas.height;
    paintOverview(overview.canvas.getContext("2d"), view, width, height, state);
  }
  pen.drawImage(overview.canvas, 0, 0, width, height);
  const a = view.x(state.from), b = view.x(state.to);
  pen.globalAlpha = 0.65;
  pen.fillStyle = theme.paper;
  pen.fillRect(view.left, 2, a - view.left, height - 4);
  pen.fillRect(b, 2, view.left + view.width - b, height - 4);
  pen.globalAlpha = 1;
  pen.strokeStyle = theme.faint;
  pen.lineWidth = 1.5;
  pen.strokeRect(a, 2.5, Math.max(b - a, 2), height - 5);
  return view;
}

function paintOverview(pen, view, width, height, state) {
  pen.setTransform(view.ratio, 0, 0, view.ratio, 0, 0);
  pen.fillStyle = theme.paper;
  pen.fillRect(0, 0, width, height);
  const lanes = state.scenes.flatMap((scene) => scene.lanes.map((lane) => ({lane, scene})));
  const each = (height - 8) / lanes.length;
  const row = {bar: Math.max(each * (each > 3 ? 0.8 : 1), 0.7)};
  const whole = {...state, from: 0, to: state.total};
  lanes.forEach(({lane, scene}, k) => {
    const last = lane.end.length - 1;
    if (last >= 0) paintDense(pen, lane, scene, 0, last, 4 + k * each, row, view, whole);
  });
}
