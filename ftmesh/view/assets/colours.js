// Colours: those of the style, light or dark, as the canvas takes them.

const LEVELS = 12; // of heat
const SHADES = 256; // of a chunk that is not complete

function readColours() {
  const probe = document.body.appendChild(document.createElement("span"));
  const colour = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const names = "stage muted link chip low high done failed cursor add copy".split(" ");
  const colours = Object.fromEntries(names.map((name) => [name, colour(name)]));
  const [cool, warm, hot] = ["cool", "warm", "hot"].map(colour);
  probe.remove();
  colours.heat = Array.from({ length: LEVELS }, (_, i) => {
    const t = (2 * i) / (LEVELS - 1);
    return t < 1 ? mixed(cool, warm, t) : mixed(warm, hot, t - 1);
  });
  const shade = (_, i) => word(mixed(colours.low, colours.high, i / (SHADES - 1)));
  colours.shades = Uint32Array.from({ length: SHADES }, shade);
  return colours;
}

// Red, green and blue of a colour as browsers compute it, rgb(1, 2, 3).
function parts(colour) {
  return colour.match(/\d+/g).slice(0, 3).map(Number);
}

function mixed(from, to, share) {
  const [a, b] = [parts(from), parts(to)];
  return `rgb(${a.map((value, i) => Math.round(value + share * (b[i] - value))).join(", ")})`;
}

// A colour as a canvas keeps it in memory.
function word(colour) {
  const [red, green, blue] = parts(colour);
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}
