// One step of FSDP on a clock of its own, in ms: what each of two ranks computes, and what the link carries, one message
// after another. Tests hold it to shardlab/planner/replay.py.
const ROOT = {name: 'the root', short: 'r', kB: 82, forward: 1, backward: 2};
const BLOCKS = [0, 1, 2, 3].map(number => ({name: `block ${number}`, short: number, kB: 200, forward: 5, backward: 10}));
const UNITS = [ROOT, ...BLOCKS], ALL_KB = 882, STEP_MS = 3;

// gatherMs: of a block. keeps: whether what is gathered stays from forward to backward.
function fsdpStep(prefetch, gatherMs, keeps = false) {
  const events = [], held = [];
  let now = 0, linkFree = 0;
  const send = (what, unit, phase) => {
    const start = Math.max(now, linkFree);
    linkFree = start + gatherMs * unit.kB / 200;
    events.push({row: 'link', what, unit, phase, start, end: linkFree});
    return linkFree;
  };
  const wait = (end, unit) => {
    if (end > now) events.push({row: 'wait', what: 'wait', unit, start: now, end});
    now = Math.max(now, end);
  };
  const compute = (what, unit, ms) => { events.push({row: 'compute', what, unit, start: now, end: now += ms}); };
  for (const phase of ['forward', 'backward']) {
    const isForward = phase == 'forward', order = isForward ? [...BLOCKS, ROOT] : [ROOT, ...BLOCKS.toReversed()];
    const gathers = isForward ? UNITS : keeps ? [] : order;  // the root is gathered first in both
    const ready = new Map();
    order.forEach((unit, place) => {
      const ahead = place + 1 + prefetch + (isForward ? 1 : 0);
      for (const other of gathers.slice(ready.size, ahead)) {
        const from = now;
        ready.set(other, send('gather', other, phase));
        held.push({unit: other, from, ready: ready.get(other), until: Infinity});
      }
      wait(ready.get(unit) ?? 0, unit);
      compute(phase, unit, unit[phase]);
      if (isForward ? !keeps : unit != ROOT) free(unit);
      if (!isForward && unit != ROOT) send('reduce', unit, phase);
    });
  }
  free(ROOT);
  send('reduce', ROOT, 'backward');
  wait(linkFree, null);
  compute('step', null, STEP_MS);
  return {events, held, end: now, waits: sum(events.filter(one => one.row == 'wait').map(one => one.end - one.start))};

  function free(unit) { for (const one of held) if (one.unit == unit) one.until = Math.min(one.until, now); }
}
const sum = numbers => numbers.reduce((a, b) => a + b, 0);
// kB of parameters of others that a rank holds or has room for.
const gatheredAt = (held, ms) => sum(held.filter(one => one.from <= ms && ms < one.until).map(one => one.unit.kB));
const mostGathered = held => Math.max(...held.map(one => gatheredAt(held, one.from)));

// The rows of compute and link, pale after the moment `ms`; what is gathered, below lines of [kB, words, start or end].
const COLOURS = {gather: 'all-gather', reduce: 'reduce-scatter', forward: 'forward', backward: 'backward', step: 'step'};
function drawTimeline(pen, y, {events, held, end}, ms, lines) {
  const left = 62, scale = (pen.width - left - 8) / end, x = at => left + at * scale, bottom = y + 220;
  pen.text(0, y + 16, 'compute');
  pen.text(0, y + 56, 'link');
  for (const one of events) {
    const width = (one.end - one.start) * scale, dim = one.start <= ms ? '' : 'opacity=".35"';
    if (one.row == 'wait') { pen.box(x(one.start), y + 24, width, 6, 'var(--wait)', dim); continue; }
    const top = one.row == 'link' ? y + 40 : y;
    pen.box(x(one.start), top, width - 1, 22, `var(--${COLOURS[one.what]})`, dim);
    const fill = dim ? 'var(--ink)' : one.what == 'forward' ? '#111' : '#fff';
    if (one.unit && width > 12) pen.text(x((one.start + one.end) / 2), top + 16, one.unit.short, `text-anchor="middle" style="fill:${fill}"`);
  }
  const height = kB => bottom - kB / ALL_KB * 120;
  pen.text(0, bottom - 60, 'gathered');
  pen.text(0, bottom - 44, 'kB');
  const times = [...new Set(held.flatMap(one => [one.from, Math.min(one.until, end)]))].sort((a, b) => a - b);
  const steps = times.map(at => `H${x(at)} V${height(gatheredAt(held, at))}`).join(' ');
  pen.path(`M${left},${bottom} ${steps} H${x(end)} V${bottom} Z`, 'fill="var(--gathered)" opacity=".35"');
  pen.line(x(ms), y - 6, x(ms), bottom + 4, 'stroke-width="2"');
  pen.text(x(ms), bottom + 20, `${ms.toFixed(1)} ms`, `text-anchor="${ms < end / 2 ? 'start' : 'end'}"`);
  for (const [kB, words, place] of lines) {
    pen.line(left, height(kB), x(end), height(kB), 'stroke-dasharray="6 4"');
    pen.text(place == 'end' ? x(end) : left, height(kB) - 6, words, `text-anchor="${place}" class="halo"`);
  }
  return bottom + 28;
}
