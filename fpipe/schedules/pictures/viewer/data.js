// The timelines as the page carries them, unpacked into flat arrays, and the questions that are asked of them.

const WORDS = {F: "forward", B: "backward", I: "input gradient", W: "weight gradient"};

function unpack(raw) {
  for (const scene of raw.scenes) {
    scene.lanes.forEach((lane, rank) => {
      lane.rank = rank;
      lane.start = Float64Array.from(lane.start);
      lane.end = Float64Array.from(lane.end);
      lane.names = lane.names ? lane.names.split(",") : [];
      lane.parts = new Array(lane.names.length);  // made when first asked for: most are never looked at
      lane.colour = colours(lane, scene.palette);
      lane.cause = new Map();  // index -> {rank, index, wait}
      for (let k = 0; k < lane.waits.length; k += 4) {
        lane.cause.set(lane.waits[k], {rank: lane.waits[k + 1], index: lane.waits[k + 2], wait: lane.waits[k + 3]});
      }
      lane.most = lane.held.reduce((most, held) => Math.max(most, held), 0);
    });
    scene.most = scene.lanes.reduce((most, lane) => Math.max(most, lane.most), 0) || 1;
  }
  return raw;
}

// Two palette indices per bar, equal unless the bar is fused; what a third part would be is not shown by colour.
function colours(lane, palette) {
  const at = Object.fromEntries(palette.map((entry, k) => [entry.key, k]));
  const found = new Uint8Array(2 * lane.names.length);
  let c = 0;
  lane.names.forEach((name, k) => {
    const ops = name.match(/[FBIW]/g);
    const keys = ops.map((op) => at[op + lane.shades[c++]]);
    found[2 * k] = keys[0];
    found[2 * k + 1] = keys[Math.min(1, keys.length - 1)];
  });
  return found;
}

function partsOf(lane, index) {
  return lane.parts[index] ??= lane.names[index].split(";").map((name) => {
    const [, stage, op, microbatch] = name.match(/^(\d+)([FBIW])([\d.]+)$/);
    return {name, stage: +stage, op, microbatch};
  });
}

// The first index whose bar ends after `time`.
function firstAfter(lane, time) {
  let low = 0, high = lane.end.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane.end[middle] > time) high = middle; else low = middle + 1;
  }
  return low;
}

// The bar that runs at `time`, or the one that the rank waits for then.
function barAt(lane, time) {
  const index = firstAfter(lane, time);
  if (index >= lane.end.length) return {index: -1, next: -1};
  return lane.start[index] <= time ? {index, next: -1} : {index: -1, next: index};
}

function heldAt(lane, time) {
  let low = 0, high = lane.times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane.times[middle] <= time) low = middle + 1; else high = middle;
  }
  return low ? lane.held[low - 1] : 0;
}

// `3F2`, `F2` (any stage), `F2.1` (a slice), `3F` (any microbatch), `W` (all): every bar with such a part, in order of time.
function find(scenes, query) {
  const asked = query.trim().toUpperCase().match(/^(\d*)([FBIW])([\d.]*)$/);
  if (!asked) return null;
  const wanted = new RegExp(`(^|;)${asked[1] || "\\d+"}${asked[2]}${asked[3].replace(".", "[.]") || "[\\d.]+"}(;|$)`);
  const found = [];
  scenes.forEach((scene, s) => scene.lanes.forEach((lane, rank) => lane.names.forEach((name, index) => {
    if (wanted.test(name)) found.push({scene: s, rank, index, start: lane.start[index]});
  })));
  return found.sort((a, b) => a.start - b.start || a.scene - b.scene || a.rank - b.rank);
}

function number(value) {
  if (Math.abs(value) >= 1000) return value.toFixed(0);
  return String(+value.toPrecision(4));
}

function percent(share) {
  return String(+(100 * share).toFixed(1)) + "%";
}

function held(amount, unit) {
  if (unit !== "bytes") return number(amount);
  const prefixes = ["B", "KiB", "MiB", "GiB"];
  let k = 0;
  while (Math.abs(amount) >= 1024 && k < 3) { amount /= 1024; k++; }
  return (k ? amount.toFixed(1) : amount.toFixed(0)) + " " + prefixes[k];
}

function time(value, scene) {
  return String(+value.toPrecision(6)) + (scene.unit ? " " + scene.unit : "");
}

// What is told of a bar, in lines of [class, text]; the first is its name.
function describe(scenes, s, rank, index) {
  const scene = scenes[s], lane = scene.lanes[rank];
  const parts = partsOf(lane, index);
  const lines = [["", parts.map((p) => p.name).join(" with ")]];
  for (const p of parts) lines.push(["faint", `${WORDS[p.op]} of stage ${p.stage}, microbatch ${p.microbatch}`]);
  lines.push(["", `rank ${rank}` + (scenes.length > 1 ? `, ${scene.label}` : "")]);
  const length = lane.end[index] - lane.start[index];
  lines.push(["", `start ${time(lane.start[index], scene)}, end ${time(lane.end[index], scene)} (${time(length, scene)})`]);
  lines.push(["", waited(scene, lane, index)]);
  lines.push(["faint", `rank holds ${held(heldAt(lane, lane.start[index]), scene.memoryUnit)}`]);
  scenes.forEach((other, o) => {
    const twin = o === s ? -1 : other.lanes[rank] ? other.lanes[rank].names.indexOf(lane.names[index]) : -1;
    if (twin < 0) return;
    const there = other.lanes[rank];
    const more = there.end[twin] - there.start[twin];
    lines.push(["faint", `${other.label}: ${time(there.start[twin], other)} to ${time(there.end[twin], other)} (${time(more, other)})`]);
  });
  return lines;
}

function waited(scene, lane, index) {
  const cause = lane.cause.get(index);
  if (!cause) {
    const gap = lane.start[index] - (index ? lane.end[index - 1] : lane.start[0]);
    return gap > 1e-9 * scene.total ? `the rank was idle ${time(gap, scene)} before it` : "started as soon as its rank was free";
  }
  const from = scene.lanes[cause.rank];
  const under = lane.start[index] - from.end[cause.index];
  const way = under > 1e-9 * scene.total ? `; ${time(under, scene)} on the way` : "";
  return `waited ${time(cause.wait, scene)} for ${from.names[cause.index].replace(";", " with ")} of rank ${cause.rank}${way}`;
}

function describeIdle(scene, lane, next) {
  const from = next > 0 ? lane.end[next - 1] : 0;
  if (next < 0) return [["", "idle"], ["faint", "nothing left to do"]];
  return [["", `idle ${time(lane.start[next] - from, scene)}`],
    ["faint", `${time(from, scene)} to ${time(lane.start[next], scene)}, before ${lane.names[next].replace(";", " with ")}`],
    ["", waited(scene, lane, next)]];
}
