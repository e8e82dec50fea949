// What is drawn over the lanes: outlines, arrows, messages, the critical path; and the axis and the overview.

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
  pen.textAlign = "left";
  const unit = state.scenes[0].unit;
  if (unit) pen.fillText(wideScreen() ? `time in ${unit}` : unit, wideScreen() ? 16 : 6, AXIS / 2 - 1);
}

// The overview: all lanes, thin, drawn once, and the window over them.
const overview = {canvas: document.createElement("canvas"), key: null};
function paintMap(canvas, state) {
  const {pen, width, height, ratio} = penOf(canvas);
  const view = {left: GUTTER, width: Math.max(width - GUTTER - 12, 10), ratio};
  view.scale = view.width / state.total;
  view.x = (time) => view.left + time * view.scale;
  const key = [view.left, width, height, ratio, theme.paper, state.searches, state.loads].join();
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
  if (each < 4) return paintTotals(pen, view, height, state);
  const thick = each * 0.8;
  lanes.forEach(({lane, scene}, k) => paintMeans(pen, lane, scene, 4 + k * each, thick, view, state));
}

// Many lanes: of all ranks of a timeline, the share that does each kind of work; and where something was found.
function paintTotals(pen, view, height, state) {
  const high = (height - 8) / state.scenes.length, whole = {...state, from: 0, to: state.total};
  state.scenes.forEach((scene, s) => {
    const {low, count, shares, add} = pieces(scene, view, whole, 1 / scene.lanes.length);
    for (const lane of scene.lanes) addLane(lane, scene, 0, lane.end.length - 1, add, whole);
    paintStacks(pen, shares, count, low, scene, view, 4 + s * high, Math.max(high - 2, 1));
    pen.fillStyle = theme.mark;
    for (const lane of state.matches ? scene.lanes : []) {
      for (const k of matchesOf(state, lane)) pen.fillRect(view.x(lane.start[k]), 4 + s * high, 1.5, high - 2);
    }
  });
}

// A thin line for every message of the actions in the window, where actions can be told apart.
function paintMessages(pen, view, state) {
  pen.strokeStyle = theme["message-line"];
  pen.lineWidth = 0.8;
  pen.globalAlpha = 0.8;
  pen.beginPath();
  state.scenes.forEach((scene, s) => {
    if (scene.cell * view.scale < 4) return;
    scene.sent ??= messagesOf(scene);
    const rows = state.rows.filter((row) => row.lane && row.scene === s);
    for (const row of rows) {
      for (const {index, rank, at} of scene.sent[row.rank]) {
        const there = scene.lanes[rank].start[at];
        if (there < state.from || row.lane.end[index] > state.to) continue;
        const other = rows.find((one) => one.rank === rank);
        const y = view.top - state.scroll;
        const [a, b] = row.y < other.y ? [row.y + row.bar, other.y] : [row.y, other.y + other.bar];
        pen.moveTo(view.x(row.lane.end[index]), y + a);
        pen.lineTo(view.x(there), y + b);
      }
    }
  });
  pen.stroke();
  pen.globalAlpha = 1;
}

function paintCritical(pen, view, state) {
  pen.strokeStyle = theme.mark;
  pen.lineWidth = 2.2;
  pen.beginPath();
  state.scenes.forEach((scene, s) => {
    scene.path ??= criticalPath(scene);
    const rows = new Map(state.rows.filter((row) => row.lane && row.scene === s).map((row) => [row.rank, row]));
    let begun = false;
    for (const {rank, index} of scene.path) {
      const lane = scene.lanes[rank], row = rows.get(rank);
      if (lane.end[index] < state.from || lane.start[index] > state.to) { begun = false; continue; }
      const y = view.top - state.scroll + row.y + row.bar - 1.5;
      if (begun) pen.lineTo(view.x(lane.start[index]), y); else pen.moveTo(view.x(lane.start[index]), y);
      pen.lineTo(view.x(lane.end[index]), y);
      begun = true;
    }
  });
  pen.stroke();
}
