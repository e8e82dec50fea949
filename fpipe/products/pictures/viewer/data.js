// The timelines as the page carries them, unpacked into flat arrays, and the questions that are asked of them.

let WORDS = {}, IDLE = {};  // of kinds of work and of causes of idle time

// A long text of the page: base64 of deflated JSON.
async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

function unpack(raw) {
  const letters = raw.scenes.some((scene) => scene.tints.length);  // names have them where colours are shifts
  for (const scene of raw.scenes) {
    scene.letters = letters;
    scene.small = scene.tints.length > 0 && Math.max(...scene.codes.map(([, , kind]) => +kind.slice(1))) === 1;
    const index = new Map(scene.palette.map((entry, k) => [entry.key, k]));
    scene.codes = scene.codes.map(([text, key, kind]) => [text, index.get(key), kind, index.get(kind)]);
    scene.lanes.forEach((lane, rank) => unpackLane(scene, lane, rank));
    finish(scene);
  }
  return raw;
}

// What follows from the lanes of a scene.
function finish(scene) {
  scene.most = scene.lanes.reduce((most, lane) => Math.max(most, lane.most), 0) || 1;
  scene.ops = [..."FBIW"].filter((op) => scene.lanes.some((lane) => lane.names.some((name) => name.includes(op))));
  scene.forms = [...new Set(scene.lanes.flatMap((lane) => lane.names.flatMap((name) => name.replace(/\d/g, "0").split(";"))))];
  const varies = (text) => new Set(scene.lanes.map(text)).size > 1;  // what is the same for all ranks is in the head
  scene.varies = {bubble: varies((lane) => percent(lane.bubble)), peak: varies((lane) => amount(lane.peak, scene))};
  scene.keys = [...new Set(scene.lanes.flatMap((lane) => [...new Set(lane.colour)]))].sort((a, b) => a - b).map((k) => scene.palette[k]);
  scene.shades = Math.max(...scene.keys.map((entry) => +entry.key.slice(1))) + 1;
  scene.fused = scene.lanes.some((lane) => lane.names.some((name) => name.includes(";")));
  scene.used = new Set(scene.lanes.flatMap((lane) => lane.idle.map((gap) => gap.cause)));
  const work = scene.lanes.reduce((sum, lane) => sum + lane.end.reduce((all, end, k) => all + end - lane.start[k], 0), 0);
  scene.each = work / scene.lanes.length / Math.max(scene.microbatches, 1);  // a rank's work on one microbatch
  return scene;
}

// The colours of compared scenes: of kinds of work instead of shifts, or back.
function recolour(scenes) {
  for (const scene of scenes.filter((one) => one.tints?.length || one.put)) {
    for (const lane of scene.lanes) [lane.colour, lane.kind] = [lane.kind, lane.colour];
    [scene.tints, scene.put] = [scene.put ?? [], scene.tints];
    finish(scene);
  }
}

// The numbers of which these are the differences.
function sums(differences) {
  let at = 0;
  return differences.map((difference) => at += difference);
}

function unpackLane(scene, lane, rank) {
  const times = (differences) => sums(differences).map((time) => time / scene.scale);
  const units = sums(lane.units), count = lane.start.length;
  Object.assign(lane, {rank, letters: scene.letters, small: new Set()});  // stages with small letters
  lane.start = Float64Array.from(times(lane.start));
  lane.end = Float64Array.from(times(lane.end));
  lane.names = new Array(count);
  lane.colour = new Uint16Array(2 * count);  // two palette indices, equal unless the bar is fused
  lane.kind = scene.tints?.length ? new Uint16Array(2 * count) : lane.colour;  // the same by kinds of work
  lane.parts_ = new Array(count);  // filled when first asked for: most are never looked at
  for (let k = 0, p = 0; k < count; k++) {
    let name = "";
    for (let part = 0; part < lane.parts[k]; part++, p++) {
      const [text, colour, kind, plain] = scene.codes[lane.codes[p]], unit = units[p];
      if (scene.small && kind.endsWith("1")) lane.small.add(parseInt(text, 10));
      const suffix = scene.slices > 1 ? `${Math.floor(unit / scene.slices)}.${unit % scene.slices}` : unit;
      name += (part ? ";" : "") + text + suffix;
      if (part < 2) for (let half = part; half < 2; half++) {
        lane.kind[2 * k + half] = plain;
        lane.colour[2 * k + half] = colour;
      }
    }
    lane.names[k] = name;
  }
  const [indices, ranks, positions] = lane.waits.slice(0, 3).map(sums), waits = times(lane.waits[3]);
  lane.cause = new Map();  // index -> {rank, index, wait}
  indices.forEach((index, k) => lane.cause.set(index, {rank: ranks[k], index: positions[k], wait: waits[k]}));
  lane.times = times(lane.times);
  lane.held = sums(lane.held).map((amount) => amount / 1000);
  lane.most = lane.held.reduce((most, held) => Math.max(most, held), 0);
  const [starts, ends] = lane.idle.slice(0, 2).map(times), causes = lane.idle[2];
  lane.idle = starts.map((start, k) => ({start, end: ends[k], cause: causes[k]}));
}

function partsOf(lane, index) {
  return lane.parts_[index] ??= lane.names[index].split(";").map((name) => {
    const [, stage, op, microbatch] = name.match(/^(\d+)([FBIW])([\d.]+)$/);
    const letter = !lane.letters ? "" : lane.small.has(+stage) ? op.toLowerCase() : op;
    return {name, stage: +stage, op, microbatch, short: letter + microbatch};
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

// What a rank holds, with its unit.
function held(value, scene) {
  const text = amount(value, scene), unit = scene.memoryUnit;
  return unit === "bytes" ? text : `${text} ${text === "1" ? unit.replace("microbatches", "microbatch") : unit}`;
}

function amount(value, scene) {
  if (scene.memoryUnit !== "bytes") return number(value);
  const prefixes = ["B", "KiB", "MiB", "GiB"];
  let k = 0;
  while (Math.abs(value) >= 1024 && k < 3) { value /= 1024; k++; }
  return (k ? value.toFixed(1) : value.toFixed(0)) + " " + prefixes[k];
}

function time(value, scene) {
  return number(value) + (scene.unit ? " " + scene.unit : "");
}

// The description of a bar, in lines of [class, text]; the first is its name.
function describe(scenes, s, rank, index) {
  const scene = scenes[s], lane = scene.lanes[rank];
  const parts = partsOf(lane, index);
  const lines = [["", parts.map((p) => p.name).join(" with ")]];
  const shift = lane.shifts?.[index], than = scenes[0].label;
  if (Math.abs(shift) > 1e-9 * scene.total) lines.push(["", `ends ${time(Math.abs(shift), scene)} ${shift > 0 ? "later" : "earlier"} than in ${than}`]);
  for (const p of parts) lines.push(["faint", `${WORDS[p.op]} of stage ${p.stage}, microbatch ${p.microbatch}`]);
  lines.push(["", `rank ${rank}` + (scenes.length > 1 ? `, ${scene.label}` : "")]);
  const length = lane.end[index] - lane.start[index];
  lines.push(["", `start ${time(lane.start[index], scene)}, end ${time(lane.end[index], scene)} (${time(length, scene)})`]);
  lines.push(["", waited(scene, lane, index)]);
  lines.push(["faint", `rank holds ${held(heldAt(lane, lane.start[index]), scene)}`]);
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

function describeIdle(scene, lane, time_, next) {
  const gap = lane.idle.find((one) => one.start <= time_ && time_ < one.end);
  if (!gap) return [["", "idle"]];
  const lines = [["", `idle ${time(gap.end - gap.start, scene)}: ${IDLE[gap.cause]}`],
    ["faint", `${time(gap.start, scene)} to ${time(gap.end, scene)}` + (next < 0 ? ", nothing left to do" : `, before ${lane.names[next].replace(";", " with ")}`)]];
  if (next >= 0) lines.push(["", waited(scene, lane, next)]);
  return lines;
}

// (rank, index) of the chain of actions that ends last, each held back by the one before it.
function criticalPath(scene) {
  let rank = -1;
  scene.lanes.forEach((lane, r) => {
    if (lane.end.length && (rank < 0 || lane.end.at(-1) > scene.lanes[rank].end.at(-1))) rank = r;
  });
  if (rank < 0) return [];
  let index = scene.lanes[rank].end.length - 1;
  const path = [];
  while (index >= 0) {
    path.push({rank, index});
    const cause = scene.lanes[rank].cause.get(index);
    [rank, index] = cause ? [cause.rank, cause.index] : [rank, index - 1];
  }
  return path.reverse();
}

// Per rank, in order of time: {index, rank, at} of every message that an action sends to another rank.
function messagesOf(scene) {
  const where = new Map();
  scene.lanes.forEach((lane, rank) => lane.names.forEach((name, index) => {
    for (const one of name.split(";")) where.set(one, {rank, index});
  }));
  const sent = scene.lanes.map(() => []);
  for (const [name, {rank, index}] of where) {
    const [, stage, op, rest] = name.match(/^(\d+)(.)(.*)$/);
    const users = op === "F" ? [`${+stage + 1}F`] : op === "W" ? [] : [`${stage - 1}B`, `${stage - 1}I`];
    for (const user of users) {
      const there = where.get(user + rest);
      if (there && there.rank !== rank) sent[rank].push({index, rank: there.rank, at: there.index});
    }
  }
  return sent;
}
