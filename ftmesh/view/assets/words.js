// Words: amounts, chips, links and commands, written as ftmesh writes them.

const AXES = "xyz";

function formatBytes(amount) {
  for (const unit of ["B", "kB", "MB"]) {
    if (amount < 999.5) return `${three(amount)} ${unit}`;
    amount /= 1000;
  }
  return `${three(amount)} GB`;
}

function formatTime(us) {
  if (us < 999.5) return `${three(us)} µs`;
  return us < 999500 ? `${three(us / 1e3)} ms` : `${three(us / 1e6)} s`;
}

function three(value) {
  return value >= 999.5 ? String(Math.round(value)) : String(Number(value.toPrecision(3)));
}

const counted = new Intl.NumberFormat("en");

function count(number, noun) {
  return `${counted.format(number)} ${noun}${number === 1 ? "" : "s"}`;
}

function coordOf(place, shape) {
  return shape.map((size) => {
    const here = place % size;
    place = (place - here) / size;
    return here;
  });
}

function placeOf(coord, shape) {
  return coord.reduceRight((place, here, axis) => place * shape[axis] + here, 0);
}

function formatCoord(place, shape) {
  return coordOf(place, shape).join(",");
}

// The places of a block, the low corner first.
function block(corner, size, shape) {
  let coords = [[]];
  for (let axis = shape.length - 1; axis >= 0; axis--) {
    const along = Array.from({ length: size[axis] }, (_, step) => corner[axis] + step);
    coords = coords.flatMap((rest) => along.map((here) => [here, ...rest]));
  }
  return coords.map((coord) => placeOf(coord, shape));
}

// Blocks that cover exactly these places: 2x2@2,2;1x1@7,7.
function formatFailed(places, shape) {
  const left = new Set(places);
  const blocks = [];
  while (left.size) {
    const corner = coordOf(Math.min(...left), shape);
    const size = shape.map(() => 1);
    shape.forEach((room, axis) => {
      for (;;) {
        const grown = size.map((n, i) => n + (i === axis));
        if (corner[axis] + grown[axis] > room) break;
        if (!block(corner, grown, shape).every((place) => left.has(place))) break;
        size[axis]++;
      }
    });
    blocks.push(`${size.join("x")}@${corner.join(",")}`);
    block(corner, size, shape).forEach((place) => left.delete(place));
  }
  return blocks.join(";");
}

function formatLinks(cables, shape) {
  const ends = ([a, b]) => `${formatCoord(a, shape)}-${formatCoord(b, shape)}`;
  return cables.map(ends).sort().join(";");
}

// What a scene's mesh, or a changed one, is asked for by.
function requestFor(mesh, failed, failedLinks) {
  return {
    mesh: mesh.shape.join("x"),
    wrap: mesh.wrap.map((wraps, axis) => (wraps ? AXES[axis] : "")).join(""),
    failed,
    failed_links: failedLinks,
    devices_per_chip: mesh.devices_per_chip,
  };
}

// A word as a shell takes it, whatever is in it.
function quoted(text) {
  return /^[\w,@.-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

function commandFor(request, payloadBytes, options) {
  const words = ["ftmesh view", quoted(request.mesh)];
  words.push(`--failed ${quoted(request.failed)}`);
  if (request.failed_links) words.push(`--failed-links ${quoted(request.failed_links)}`);
  // With --tpu, a mesh wraps as such a slice does unless --wrap says otherwise.
  const wrap = request.wrap || (/--tpu/.test(options) ? "none" : "");
  if (wrap) words.push(`--wrap ${quoted(wrap)}`);
  if (request.devices_per_chip > 1) words.push(`--devices ${request.devices_per_chip}`);
  if (payloadBytes !== 1e8) words.push(`--payload ${payloadBytes}`);
  if (options) words.push(options);
  return `${words.join(" ")} --out view.html`;
}
