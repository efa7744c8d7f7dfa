// Chart: time against payload, as Python simulated it, with lax.psum and the limit of any
// all-reduce.

const WIDE = 360;
const HIGH = 214;
const ROOM = { left: 46, right: 10, top: 10, bottom: 34 };

class Chart {
  constructor(svg, onPick) {
    this.svg = svg;
    svg.setAttribute("viewBox", `0 0 ${WIDE} ${HIGH}`);
    svg.addEventListener("click", (event) => {
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * WIDE;
      const share = (x - ROOM.left) / (WIDE - ROOM.left - ROOM.right);
      if (this.scene) onPick(this.nearest(share));
    });
  }

  // The payload nearest to a place across the chart.
  nearest(share) {
    const [low, high] = this.range;
    const wanted = low * (high / low) ** share;
    const far = (bytes) => Math.abs(Math.log(bytes / wanted));
    return this.scene.payloads.reduce((best, bytes) => (far(bytes) < far(best) ? bytes : best));
  }

  draw(scene, payloadBytes, algorithm) {
    this.scene = scene;
    this.svg.replaceChildren();
    const lines = scene.algorithms.filter((entry) => entry.us);
    const others = scene.peers.slice(0, 1);
    const every = [...scene.limit_us, ...[...lines, ...others].flatMap((entry) => entry.us)];
    this.range = [scene.payloads[0], scene.payloads.at(-1)];
    this.times = [Math.min(...every) / 1.5, Math.max(...every) * 1.5];
    this.axes();
    const at = scene.payloads.indexOf(payloadBytes);
    const marker = this.add("line", { class: "marker" });
    set(marker, { x1: this.x(payloadBytes), x2: this.x(payloadBytes) });
    set(marker, { y1: ROOM.top, y2: HIGH - ROOM.bottom });
    this.line(scene.limit_us, "limit");
    for (const peer of others) this.line(peer.us, "peer");
    for (const entry of lines) {
      const shown = entry.algorithm === algorithm ? " shown" : "";
      this.line(entry.us, `algorithm ${entry.algorithm}${shown}`);
      const place = { cx: this.x(payloadBytes), cy: this.y(entry.us[at]), r: shown ? 4 : 2.6 };
      this.add("circle", { class: `algorithm ${entry.algorithm}${shown}`, ...place });
    }
  }

  axes() {
    const inside = (value, [low, high]) => value >= low && value <= high;
    for (let power = 3; power <= 10; power++) {
      if (inside(10 ** power, this.range) && power % 2 === 0) {
        const x = this.x(10 ** power);
        this.add("line", { class: "grid", x1: x, x2: x, y1: ROOM.top, y2: HIGH - ROOM.bottom });
        this.label(formatBytes(10 ** power), x, HIGH - ROOM.bottom + 13, "middle");
      }
    }
    for (let power = 0; power <= 8; power++) {
      if (inside(10 ** power, this.times)) {
        const y = this.y(10 ** power);
        this.add("line", { class: "grid", x1: ROOM.left, x2: WIDE - ROOM.right, y1: y, y2: y });
        this.label(formatTime(10 ** power), ROOM.left - 6, y + 3.5, "end");
      }
    }
    this.label("payload", (WIDE + ROOM.left) / 2, HIGH - 4, "middle");
  }

  line(times, kind) {
    const points = times.map((us, i) => `${this.x(this.scene.payloads[i])},${this.y(us)}`);
    this.add("polyline", { class: kind, points: points.join(" ") });
  }

  x(bytes) {
    return scaled(bytes, this.range, ROOM.left, WIDE - ROOM.right);
  }

  y(us) {
    return scaled(us, this.times, HIGH - ROOM.bottom, ROOM.top);
  }

  label(text, x, y, anchor) {
    this.add("text", { x, y, "text-anchor": anchor }).textContent = text;
  }

  add(kind, attributes) {
    const node = document.createElementNS(this.svg.namespaceURI, kind);
    set(node, attributes);
    return this.svg.appendChild(node);
  }
}

function set(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
}

function scaled(value, [low, high], from, to) {
  return Number((from + (to - from) * (Math.log(value / low) / Math.log(high / low))).toFixed(1));
}
