// Player: goes through the rounds of a schedule, sums as they say, and counts frames.

const KEPT = 240; // frames whose times are kept

class Player {
  constructor(schedule, places, ranks) {
    this.schedule = schedule;
    this.ranks = ranks;
    this.sums = new Sums(schedule, ranks.length);
    this.hops = hopsOf(schedule, places);
    this.heat = new Float64Array(2 * places.cables.length);
    this.mostHeat = this.heatAfterAll();
    this.position = 0;
    this.isPlaying = false;
    this.speed = 10; // rounds a second
  }

  get round() {
    return Math.min(Math.floor(this.position), this.schedule.numRounds);
  }

  get atEnd() {
    return this.position >= this.schedule.numRounds;
  }

  // What the busiest link carries in all, in chunks.
  heatAfterAll() {
    const perPair = new Float64Array(this.schedule.src.length);
    for (const { pair, count } of this.schedule.rows) {
      for (let row = 0; row < pair.length; row++) perPair[pair[row]] += count[row];
    }
    const total = new Float64Array(this.heat.length);
    perPair.forEach((chunks, pair) => this.warm(total, pair, chunks));
    return total.reduce((most, chunks) => Math.max(most, chunks), 0);
  }

  warm(heat, pair, chunks) {
    const { starts, links } = this.hops;
    for (let hop = starts[pair]; hop < starts[pair + 1]; hop++) heat[links[hop]] += chunks;
  }

  // Go on by some seconds; whether another round was reached.
  advance(seconds) {
    return this.seek(this.position + seconds * this.speed);
  }

  seek(position) {
    const before = this.sums.round;
    this.position = Math.max(0, Math.min(position, this.schedule.numRounds));
    if (this.round < before) {
      this.sums.reset();
      this.heat.fill(0);
    }
    while (this.sums.round < this.round) {
      const { rows, from, to } = this.sums.step();
      for (let row = from; row < to; row++) this.warm(this.heat, rows.pair[row], rows.count[row]);
    }
    if (this.atEnd) this.isPlaying = false;
    return this.sums.round !== before;
  }

  // What happens in the round to come.
  get now() {
    if (this.atEnd) return { transfers: 0, adds: 0, links: 0 };
    const { rows, from, to } = this.schedule.at(this.round);
    const used = new Set();
    let adds = 0;
    for (let row = from; row < to; row++) {
      adds += rows.op[row] === 0;
      const { starts, links } = this.hops;
      for (let hop = starts[rows.pair[row]]; hop < starts[rows.pair[row] + 1]; hop++) {
        used.add(links[hop]);
      }
    }
    return { transfers: to - from, adds, links: used.size };
  }
}

// The links of every pair's route, one after the other.
function hopsOf(schedule, places) {
  const { hops, route } = schedule;
  const starts = new Uint32Array(hops.length + 1);
  const links = [];
  for (let pair = 0, at = 0; pair < hops.length; pair++, at++) {
    for (let hop = 0; hop < hops[pair]; hop++, at++) {
      links.push(places.linkId(route[at], route[at + 1]));
    }
    starts[pair + 1] = links.length;
  }
  return { starts, links: Uint32Array.from(links) };
}

// How long frames took to make, and how far apart they were, in milliseconds.
class Frames {
  constructor() {
    this.clear();
  }

  clear() {
    this.work = [];
    this.apart = [];
    this.number = 0;
  }

  add(work, apart) {
    const at = this.number++ % KEPT;
    this.work[at] = work;
    if (apart !== null) this.apart[at] = apart;
  }

  summary() {
    const sorted = (values) => values.filter((value) => value !== undefined).sort((a, b) => a - b);
    const part = (values, share) => sorted(values)[Math.floor(share * values.length)] ?? 0;
    return {
      number: this.number,
      quick_work_ms: part(this.work, 0.1),
      work_ms: part(this.work, 0.5),
      slow_work_ms: part(this.work, 0.95),
      quick_apart_ms: part(this.apart, 0.1),
      apart_ms: part(this.apart, 0.5),
    };
  }
}
