// Unpack: schedules as Python packed them, in typed arrays.

// The inverse of ftmesh.view.page.pack, in the narrowest type that holds the numbers.
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  const inflated = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const values = new Int32Array(await new Response(inflated).arrayBuffer());
  let most = values.length ? values[0] : 0;
  for (let i = 1; i < values.length; i++) {
    values[i] += values[i - 1];
    if (values[i] > most) most = values[i];
  }
  return most < 256 ? Uint8Array.from(values) : most < 65536 ? Uint16Array.from(values) : values;
}

async function unpackAll(packed, names) {
  const columns = await Promise.all(names.map((name) => unpack(packed[name])));
  return Object.fromEntries(names.map((name, i) => [name, columns[i]]));
}

// A schedule whose rounds are numbered through; `at(round)` has the rows of one.
class Schedule {
  static async read(entry) {
    const packed = entry.schedule;
    const pairs = await unpackAll(packed, ["src", "dst", "route", "hops"]);
    const phases = [];
    for (const phase of packed.phases) {
      phases.push(await unpackAll(phase, ["starts", "pair", "chunk", "count", "op"]));
    }
    return new Schedule(entry, pairs, phases);
  }

  constructor(entry, pairs, phases) {
    Object.assign(this, pairs);
    this.algorithm = entry.algorithm;
    this.proof = entry.schedule.proof;
    this.numChunks = entry.schedule.num_chunks;
    this.rows = phases;
    this.phases = [];
    let first = 0;
    for (const { name, rounds } of entry.schedule.phases) {
      this.phases.push({ name, rounds, first });
      first += rounds;
    }
    this.numRounds = first;
  }

  phaseOf(round) {
    const after = this.phases.findIndex((phase) => round < phase.first + phase.rounds);
    return after < 0 ? this.phases.length - 1 : after;
  }

  at(round) {
    const index = this.phaseOf(round);
    const rows = this.rows[index];
    const within = round - this.phases[index].first;
    return { rows, from: rows.starts[within], to: rows.starts[within + 1] };
  }
}
