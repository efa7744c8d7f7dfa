// Places: where chips and links stand on the page, in units of the distance between two chips.
//
// x goes across and y down; a third axis is a row of layers. A link to a chip that does not stand
// next to it is a stub at either end: over the edge, or aslant to another layer.

const HALF = 0.31; // of a chip
const LANE = 0.1; // how far the two ways of a link lie from its middle
const ASLANT = 0.42;
const OVER = 0.66; // from a chip at the edge to the end of its stub

class Places {
  constructor(mesh, ratio) {
    this.shape = mesh.shape;
    this.wrap = mesh.wrap;
    this.num = mesh.shape.reduce((product, size) => product * size, 1);
    const [nx, ny = 1, nz = 1] = mesh.shape;
    const isFlat = nz === 1;
    const edge = [mesh.wrap[0] ? 0.4 : 0, mesh.wrap[1] ? 0.4 : 0]; // room for stubs
    const wide = nx + 0.9 + 2 * edge[0];
    const high = ny + (isFlat ? 0.75 : 1.3) + 2 * edge[1];
    this.columns = Places.columnsFor(nz, wide, high, ratio);
    this.width = wide * this.columns;
    this.height = high * Math.ceil(nz / this.columns);
    this.edge = edge;
    this.layers = Array.from({ length: nz }, (_, z) => ({
      x: (z % this.columns) * wide + 0.6 + edge[0],
      y: Math.floor(z / this.columns) * high + (isFlat ? 0.55 : 1) + edge[1],
    }));
    this.x = new Float32Array(this.num);
    this.y = new Float32Array(this.num);
    for (let place = 0; place < this.num; place++) {
      const [x, y = 0, z = 0] = coordOf(place, this.shape);
      this.x[place] = this.layers[z].x + x + 0.5;
      this.y[place] = this.layers[z].y + y + 0.5;
    }
    this.joinAll();
  }

  // Layers side by side, as many as make best use of the room.
  static columnsFor(layers, wide, high, ratio) {
    let best = 1;
    let most = 0;
    for (let columns = 1; columns <= layers; columns++) {
      const rows = Math.ceil(layers / columns);
      const scale = Math.min(ratio / (columns * wide), 1 / (rows * high));
      if (scale > most * 1.0001) [best, most] = [columns, scale];
    }
    return best;
  }

  // Cable c joins cables[c]; link 2c leads up its axis and link 2c + 1 back.
  joinAll() {
    this.cables = [];
    this.linkIds = new Map();
    const spans = [];
    for (let place = 0; place < this.num; place++) {
      this.shape.forEach((size, axis) => {
        const next = this.neighbour(place, axis, 1);
        if (next === null) return;
        const cable = this.cables.push([place, next]) - 1;
        this.linkIds.set(place * this.num + next, 2 * cable);
        this.linkIds.set(next * this.num + place, 2 * cable + 1);
        spans.push(this.span(place, next, axis, 1), this.span(next, place, axis, -1));
      });
    }
    this.spans = new Float32Array(spans.flat());
    this.lines = this.trimmed();
  }

  neighbour(place, axis, step) {
    const coord = coordOf(place, this.shape);
    coord[axis] += step;
    const size = this.shape[axis];
    if (coord[axis] < 0 || coord[axis] >= size) {
      if (!this.wrap[axis] || size <= 2) return null;
      coord[axis] = (coord[axis] + size) % size;
    }
    return placeOf(coord, this.shape);
  }

  // Two lines, out of a and into b, on the right-hand side of the way.
  span(a, b, axis, step) {
    const [dx, dy] = [[step, 0], [0, step], [step, -step]][axis];
    const far = Math.abs(this.x[a] - this.x[b]) + Math.abs(this.y[a] - this.y[b]);
    const reach = axis === 2 ? ASLANT : far < 1.01 ? 0.5 : OVER;
    const [sx, sy] = axis === 2 ? [-dy * 0.7 * LANE, dx * 0.7 * LANE] : [-dy * LANE, dx * LANE];
    const from = [this.x[a] + sx, this.y[a] + sy];
    const to = [this.x[b] + sx, this.y[b] + sy];
    return [
      ...from, from[0] + dx * reach, from[1] + dy * reach,
      to[0] - dx * reach, to[1] - dy * reach, ...to,
    ];
  }

  // The spans without what lies on chips.
  trimmed() {
    const lines = this.spans.slice();
    for (let at = 0; at < lines.length; at += 8) {
      for (const [chip, end] of [[0, 2], [6, 4]]) {
        const [dx, dy] = [0, 1].map((i) => lines[at + end + i] - lines[at + chip + i]);
        const share = HALF / Math.max(Math.abs(dx), Math.abs(dy));
        lines[at + chip] += share * dx;
        lines[at + chip + 1] += share * dy;
      }
    }
    return lines;
  }

  linkId(a, b) {
    return this.linkIds.get(a * this.num + b);
  }

  // The cable between two chips, whichever way round they are named.
  cableOf(a, b) {
    const link = this.linkId(a, b);
    return link === undefined ? null : link >> 1;
  }

  // What stands at a point: {chip} or {cable} or null.
  hit(x, y) {
    for (let place = 0; place < this.num; place++) {
      if (Math.abs(this.x[place] - x) <= HALF && Math.abs(this.y[place] - y) <= HALF) {
        return { chip: place };
      }
    }
    let best = null;
    let least = 0.17;
    for (let link = 0; link < 2 * this.cables.length; link++) {
      for (const half of [0, 4]) {
        const far = distance(x, y, this.spans.subarray(8 * link + half, 8 * link + half + 4));
        if (far < least) [best, least] = [{ cable: link >> 1 }, far];
      }
    }
    return best;
  }
}

function distance(x, y, [ax, ay, bx, by]) {
  const [dx, dy] = [bx - ax, by - ay];
  const along = ((x - ax) * dx + (y - ay) * dy) / (dx * dx + dy * dy);
  const t = Math.max(0, Math.min(1, along));
  return Math.hypot(x - ax - t * dx, y - ay - t * dy);
}
