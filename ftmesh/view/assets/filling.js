// Filling: each chip's chunks as small squares, deeper in colour the more contributions they hold.

class Filling {
  constructor() {
    this.canvas = document.createElement("canvas");
  }

  // Once the canvas has another size.
  clear() {
    this.image = new ImageData(this.canvas.width, this.canvas.height);
    this.pixels = new Uint32Array(this.image.data.buffer);
  }

  // With two devices both halves of a chip show the same: each holds half of every chunk.
  paint({ sums, ranks, devices }, painter) {
    const { pitch, scale, colours } = painter;
    const inset = Math.min(2, 0.05 * pitch);
    const size = Math.round(2 * (HALF * pitch - inset) * scale);
    const most = Math.max(1, Math.floor(size / scale / 2.5));
    const side = Math.min(Math.ceil(Math.sqrt(sums.numChunks)), most);
    const columns = columnsOf(size, side, devices, Math.round(0.05 * pitch * scale));
    const gap = word(colours.stage);
    const squares = new Uint32Array(side * side);
    const shades = { colours: colours.shades, done: word(colours.done) };
    ranks.forEach((place, rank) => {
      shadesOf(sums, rank, shades, squares);
      const left = Math.round(painter.x(place) * scale - size / 2);
      const top = Math.round(painter.y(place) * scale - size / 2);
      for (let y = 0; y < size; y++) {
        const row = side * Math.floor((y * side) / size);
        const start = (top + y) * this.image.width + left;
        for (let x = 0; x < size; x++) {
          this.pixels[start + x] = columns[x] < 0 ? gap : squares[row + columns[x]];
        }
      }
    });
    this.canvas.getContext("2d").putImageData(this.image, 0, 0);
  }
}

// A rank's chunks, or some of them where they are too many, as colours. Shades go by the logarithm
// of the contributions, so that the first steps are seen too.
function shadesOf(sums, rank, { colours, done }, squares) {
  const { numChunks, numRanks, counts } = sums;
  const shown = Math.min(numChunks, squares.length);
  const each = (SHADES - 1) / Math.log(numRanks);
  for (let i = 0; i < shown; i++) {
    const chunk = Math.floor((i * numChunks) / shown);
    const cell = rank * numChunks + chunk;
    const shade = Math.min(SHADES - 1, Math.floor(each * Math.log(counts[cell])));
    squares[i] = sums.isComplete(cell, chunk) ? done : colours[shade];
  }
}

// For each column of pixels of a chip, the column of squares there; -1 between two devices.
function columnsOf(size, side, devices, gap) {
  const wide = devices > 1 ? Math.floor((size - Math.max(1, gap)) / devices) : size;
  const within = (x) => (x < wide ? x : x >= size - wide ? x - (size - wide) : -1);
  return Int32Array.from({ length: size }, (_, x) => Math.floor((within(x) * side) / wide));
}
