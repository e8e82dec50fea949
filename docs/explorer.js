// Simulates a schedule with the costs of the sliders, as fpipe/actions/simulation.py does, and gives it to the viewer.

const OPS = {F: "F", I: "I", B: "I"};  // what other stages wait for

// An order of the page: per rank its actions, each a list of parts {stage, op, unit}.
function orderOf(order) {
  const [paths, route, slices, codes, rows] = order;
  return {paths, slices, route: (unit) => route ? route[unit] : 0, rows: rows.map(([known, steps, fused]) => {
    const at = new Array(codes.length).fill(-1), actions = [];
    let part = 0;
    for (let k = 0; part < known.length; k++) {
      const action = [];
      for (let n = fused ? fused[k] : 1; n > 0; n--, part++) {
        const code = known[part];
        action.push({stage: codes[code][0], op: codes[code][1], unit: at[code] += steps[part] + 1});
      }
      actions.push(action);
    }
    return actions;
  })};
}

// Costs are those of a rank's whole share, for a whole microbatch, and a message takes `comm`.
function simulate(order, costs) {
  const {paths, slices, route, rows} = orderOf(order), stages = paths[0].length;
  const part = rows.length / stages / slices;
  const times = {F: costs.F * part, I: costs.I * part, W: costs.W * part, B: (costs.I + costs.W) * part};
  const facts = new Map();  // "F stage unit" or "I stage unit" -> {end, rank, index}
  const lanes = rows.map(() => ({start: [], end: [], cause: new Map()})), clocks = rows.map(() => 0);
  const needOf = ({stage, op, unit}) => {
    const other = op === "F" ? stage - 1 : op === "W" ? stage : stage + 1;
    return other < 0 || other >= stages ? null : {key: `${op === "F" ? "F" : "I"} ${other} ${unit}`, other};
  };
  for (let moved = true; moved;) {
    moved = false;
    rows.forEach((row, rank) => {
      const lane = lanes[rank];
      while (lane.start.length < row.length) {
        const action = row[lane.start.length], needs = action.map(needOf);
        if (needs.some((need) => need && !facts.has(need.key))) return;
        let clock = clocks[rank], cause = null;
        needs.forEach((need, k) => {
          if (!need) return;
          const fact = facts.get(need.key), path = paths[route(action[k].unit)];
          const arrival = fact.end + (path[need.other] === path[action[k].stage] ? 0 : costs.comm);
          if (arrival > clock) { clock = arrival; cause = {rank: fact.rank, index: fact.index}; }
        });
        const index = lane.start.length;
        if (cause) lane.cause.set(index, {...cause, wait: clock - clocks[rank]});
        lane.start.push(clock);
        clock += action.reduce((sum, {op}) => sum + times[op], 0);
        lane.end.push(clock);
        for (const {stage, op, unit} of action) if (OPS[op]) facts.set(`${OPS[op]} ${stage} ${unit}`, {end: clock, rank, index});
        clocks[rank] = clock;
        moved = true;
      }
    });
  }
  return {lanes, rows, paths, route, slices, part, times};
}

// What a rank holds, in microbatches of its whole share: F adds, and W or B frees.
function curveOf(lane, row, part) {
  const times = [], held = [];
  let amount = 0;
  const point = (time, change) => {
    if (!change) return;
    amount += change;
    if (times.length && times.at(-1) === time) held[held.length - 1] = amount;
    else { times.push(time); held.push(amount); }
  };
  let most = 0;
  row.forEach((action, k) => {
    point(lane.start[k], part * action.filter(({op}) => op === "F").length);
    most = Math.max(most, amount);
    point(lane.end[k], -part * action.filter(({op}) => op === "B" || op === "W").length);
  });
  return {times, held, most};
}

// The idle times of a rank and their causes, as fpipe/products/pictures/scene.py finds them.
function idleOf(lanes, rows, rank, total) {
  const lane = lanes[rank], row = rows[rank], least = 1e-9 * total, found = [];
  const has = (ops) => (action) => action.some(({op}) => ops.includes(op));
  const backward = row.findIndex(has("BI"));
  const first = lane.start[Math.max(backward, 0)];
  const last = Math.max(first, lane.end[backward < 0 ? row.length - 1 : row.findLastIndex(has("F"))]);
  const add = (start, end, cause) => { if (end - start > least) found.push({start, end, cause}); };
  let free = 0;
  row.forEach((_, k) => {
    const start = lane.start[k], cause = lane.cause.get(k);
    if (start - free > least) {
      const sent = cause ? Math.min(Math.max(lanes[cause.rank].end[cause.index], free), start) : start;
      add(free, sent, k === 0 || start <= first ? "warmup" : start > last ? "tail" : cause ? "imbalance" : "other");
      add(sent, start, "message");
    }
    free = Math.max(free, lane.end[k]);
  });
  add(free, total, "tail");
  return found;
}

// The shade of a stage: its number among those of its rank, counted for each path.
function shadesOf(paths) {
  let base = 0;
  const shades = paths.map((path) => {
    const seen = new Map(), shade = path.map((rank) => {
      seen.set(rank, (seen.get(rank) ?? -1) + 1);
      return base + seen.get(rank);
    });
    base += Math.max(...seen.values()) + 1;
    return shade;
  });
  return {shades, count: base};
}

// A timeline as the viewer draws it.
function sceneOf(name, microbatches, order, costs) {
  const {lanes, rows, paths, route, slices, part, times} = simulate(order, costs);
  const total = Math.max(...lanes.map((lane) => lane.end.at(-1))), {shades, count} = shadesOf(paths);
  const palette = contents.palettes[count], entries = new Map(palette.map((entry, k) => [entry.key, k]));
  const windows = lanes.map((lane) => lane.end.at(-1) - lane.start[0]), span = Math.max(...windows);
  const busy = lanes.map((lane) => lane.end.reduce((sum, end, k) => sum + end - lane.start[k], 0));
  const bubble = 1 - busy.reduce((a, b) => a + b, 0) / (lanes.length * span);
  lanes.forEach((lane, rank) => {
    const row = rows[rank], curve = curveOf(lane, row, part);
    const text = (unit) => slices > 1 ? `${Math.floor(unit / slices)}.${unit % slices}` : unit;
    const colour = ({stage, op, unit}) => entries.get(op + shades[route(unit)][stage]);
    Object.assign(lane, {
      rank, peak: curve.most, most: curve.most, times: curve.times, held: curve.held,
      bubble: Math.max(1 - busy[rank] / span, 0), parts_: new Array(row.length),
      names: row.map((action) => action.map(({stage, op, unit}) => `${stage}${op}${text(unit)}`).join(";")),
      colour: Uint8Array.from(row.flatMap((action) => [colour(action[0]), colour(action[Math.min(1, action.length - 1)])])),
      idle: idleOf(lanes, rows, rank, total),
    });
  });
  const lengths = lanes.flatMap((lane) => lane.end.map((end, k) => end - lane.start[k])).filter((one) => one > 0).sort((a, b) => a - b);
  const peak = Math.max(...lanes.map((lane) => lane.peak));
  const used = palette.filter((entry) => rows.some((row) => row.some((action) => action.some(({op}) => op === entry.key[0]))));
  let takes = [...new Set(used.map((entry) => entry.key[0]))].map((op) => `${op} ${number(times[op])}`).join(", ");
  if (count > 1) takes += `: ${number(busy[0] / microbatches)} in all for a microbatch`;  // as units() in fpipe/products/pictures/labels.py
  return finish({
    paler: new Set(paths[0].slice(0, lanes.length)).size === lanes.length && !paths[1] && paths[0].length > lanes.length + 1
      ? `paler: stages ${lanes.length}-${paths[0].length - 1}` : "paler: other stages",
    label: name, title: `${name}: ${lanes.length} ranks, ${microbatches} microbatches`, lanes, total, unit: "", memoryUnit: "microbatches",
    figures: [["total", number(total)], ["bubble", percent(Math.max(bubble, 0))], ["peak", held(peak, {memoryUnit: "microbatches"})]],
    notes: ["", `${count === 1 ? "A rank's stage" : `Each of a rank's ${count} stages`} takes ${takes}.`],
    microbatches, cell: lengths[Math.floor(lengths.length / 20)] || 1, mean: lengths.reduce((a, b) => a + b, 0) / lengths.length || 1, palette,
  });
}

// ---- the controls ---------------------------------------------------------------------------------------------------
const names = Object.keys(contents.schedules);
const INPUTS = ["ranks", "microbatches", "stages", "F", "I", "W", "comm"];

function countsOf() {
  const at = (id) => contents[id][+$(id).value];
  return {ranks: at("ranks"), microbatches: at("microbatches"), stages: +$("stages").value};
}

// The order of a schedule for the counts of the sliders, or why there is none; 0 stages a rank are its usual number.
function chosen(name) {
  const {ranks, microbatches, stages} = countsOf();
  const tried = stages ? [stages] : [1, 2];
  const found = tried.map((per) => contents.schedules[name][`${ranks},${microbatches},${per}`]);
  return found.find((order) => typeof order !== "string") ?? found[0];
}

let drawnOnce = false;
function redraw() {
  const {ranks, microbatches, stages} = countsOf();
  const shown = {ranks, microbatches, stages: stages || "usual"};
  for (const id of INPUTS) $(id).nextElementSibling.value = shown[id] ?? number(+$(id).value);
  const costs = Object.fromEntries(["F", "I", "W", "comm"].map((id) => [id, +$(id).value]));
  const scenes = [], refused = [];
  for (const name of [$("first").value, $("second").value].filter(Boolean)) {
    const order = chosen(name);
    if (typeof order === "string") refused.push(`${name}: ${order}`);
    else scenes.push(sceneOf(name, microbatches, order, costs));
  }
  $("refused").value = refused.join("; ");
  if (scenes.length) load({...contents, scenes}, drawnOnce);
  drawnOnce ||= scenes.length > 0;
}

for (const id of ["first", "second"]) {
  for (const name of names) $(id).append(new Option(name, name));
}
for (const id of ["ranks", "microbatches"]) {
  Object.assign($(id), {min: 0, max: contents[id].length - 1, step: 1, value: contents[id].indexOf(id === "ranks" ? 4 : 8)});
}
const narrow = matchMedia("(max-width: 700px)");  // where the costs are folded
const fold = () => { $("costs").open = !narrow.matches; };
narrow.addEventListener("change", fold);
fold();
$("first").value = "1F1B";
$("second").value = "ZBVZeroBubble";
for (const id of ["first", "second", ...INPUTS]) $(id).addEventListener("input", redraw);
redraw();
window.fpipe.orders = contents.schedules;
window.fpipe.simulate = (name, key, costs) => {
  const {lanes} = simulate(contents.schedules[name][key], costs);
  return lanes.map((lane) => [lane.start, lane.end]);
};
window.fpipe.scene = (name, key, costs) => {
  const scene = sceneOf(name, +key.split(",")[1], contents.schedules[name][key], costs);
  return {figures: Object.fromEntries(scene.figures), paler: scene.paler, units: scene.notes.at(-1), idle: scene.lanes.map((lane) => lane.idle),
    peaks: scene.lanes.map((lane) => lane.peak), names: scene.lanes.map((lane) => lane.names),
    causes: scene.lanes.map((lane) => [...lane.cause].map(([k, {rank, index}]) => [k, rank, index]))};
};
