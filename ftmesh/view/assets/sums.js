// Sums: the all-reduce itself, done by the page on numbers of its own, and counted.
//
// Every chip begins with a random number for each chunk. Transfers add and copy those, modulo 2^32,
// together with the number of contributions that went in. A chunk is complete at a chip where both
// are those of the full sum; nothing that Python said about the schedule comes into it.

class Sums {
  constructor(schedule, numRanks) {
    this.schedule = schedule;
    this.numRanks = numRanks;
    this.numChunks = schedule.numChunks;
    this.mine = crypto.getRandomValues(new Uint32Array(numRanks));
    this.total = this.mine.reduce((sum, value) => (sum + value) >>> 0, 0);
    const size = numRanks * this.numChunks;
    this.counts = new Uint32Array(size);
    this.values = new Uint32Array(size);
    this.perRank = new Uint32Array(numRanks); // complete chunks at each
    this.reset();
  }

  reset() {
    for (let rank = 0, cell = 0; rank < this.numRanks; rank++) {
      for (let chunk = 0; chunk < this.numChunks; chunk++, cell++) {
        this.values[cell] = this.of(this.mine[rank], chunk);
      }
    }
    this.counts.fill(1);
    this.perRank.fill(0);
    this.complete = 0;
    this.arrived = this.cells; // contributions at all chips
    this.round = 0;
  }

  // A contribution to a chunk: each chunk has numbers of its own.
  of(value, chunk) {
    return Math.imul(value, 2 * chunk + 1) >>> 0;
  }

  get cells() {
    return this.counts.length;
  }

  isComplete(cell, chunk) {
    return this.counts[cell] === this.numRanks && this.values[cell] === this.of(this.total, chunk);
  }

  // One round: everything is read before anything is written.
  step() {
    const { rows, from, to } = this.schedule.at(this.round++);
    const { src, dst } = this.schedule;
    const chunks = this.numChunks;
    let moved = 0;
    for (let row = from; row < to; row++) moved += rows.count[row];
    if (!this.read || this.read.length < 2 * moved) this.read = new Uint32Array(2 * moved);
    for (let row = from, at = 0; row < to; row++) {
      let cell = src[rows.pair[row]] * chunks + rows.chunk[row];
      for (let left = rows.count[row]; left > 0; left--, cell++) {
        this.read[at++] = this.counts[cell];
        this.read[at++] = this.values[cell];
      }
    }
    for (let row = from, at = 0; row < to; row++) {
      const rank = dst[rows.pair[row]];
      const keeps = rows.op[row] === 0 ? 1 : 0;
      const last = rows.chunk[row] + rows.count[row];
      for (let chunk = rows.chunk[row]; chunk < last; chunk++, at += 2) {
        const cell = rank * chunks + chunk;
        const before = this.isComplete(cell, chunk);
        this.arrived -= this.counts[cell];
        this.counts[cell] = keeps * this.counts[cell] + this.read[at];
        this.values[cell] = keeps * this.values[cell] + this.read[at + 1];
        this.arrived += this.counts[cell];
        const gain = this.isComplete(cell, chunk) - before;
        this.perRank[rank] += gain;
        this.complete += gain;
      }
    }
    return { rows, from, to };
  }
}
