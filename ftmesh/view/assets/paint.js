// Paint: the mesh on a canvas. What changes with a round is kept apart from what moves in it.

const MANY = 500; // tokens from which on they are plain squares

class Painter {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
    this.ground = document.createElement("canvas");
    this.base = document.createElement("canvas");
    this.filling = new Filling();
    this.colours = readColours();
  }

  // Take the mesh and the room for it; the canvas is as high as the mesh asks for.
  place(places, width, room) {
    this.places = places;
    this.pitch = Math.min(width / places.width, room / places.height, 104);
    this.scale = window.devicePixelRatio || 1;
    const height = Math.ceil(this.pitch * places.height);
    for (const canvas of [this.canvas, this.ground, this.base, this.filling.canvas]) {
      canvas.width = Math.round(width * this.scale);
      canvas.height = Math.round(height * this.scale);
    }
    this.canvas.style.height = `${height}px`;
    this.left = (width - this.pitch * places.width) / 2;
    this.spans = places.spans.map((value, i) => value * this.pitch + (i % 2 ? 0 : this.left));
    this.lines = places.lines.map((value, i) => value * this.pitch + (i % 2 ? 0 : this.left));
    this.filling.clear();
  }

  x(place) {
    return this.places.x[place] * this.pitch + this.left;
  }

  y(place) {
    return this.places.y[place] * this.pitch;
  }

  // What is at a point of the canvas.
  hit(px, py) {
    return this.places.hit((px - this.left) / this.pitch, py / this.pitch);
  }

  // What stays while the damage does.
  paintGround({ damage }) {
    const pen = this.ground.getContext("2d", { alpha: false });
    pen.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    pen.fillStyle = this.colours.stage;
    pen.fillRect(0, 0, this.ground.width, this.ground.height);
    this.labels(pen);
    this.cables(pen, damage);
    this.chips(pen, damage);
  }

  // Everything but what moves.
  paintBase(state) {
    const pen = this.base.getContext("2d", { alpha: false });
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.drawImage(this.ground, 0, 0);
    if (state.isDraft) return;
    this.filling.paint(state, this);
    pen.drawImage(this.filling.canvas, 0, 0);
    pen.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    this.hotLinks(pen, state);
  }

  labels(pen) {
    const size = Math.max(8, Math.min(12, this.pitch * 0.3));
    pen.font = `${size}px ${getComputedStyle(document.body).fontFamily}`;
    pen.fillStyle = this.colours.muted;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    const { layers, shape, edge } = this.places;
    const every = this.pitch >= 18 ? 1 : this.pitch >= 9 ? 4 : 8;
    layers.forEach((layer, z) => {
      const [left, top] = [layer.x * this.pitch + this.left, layer.y * this.pitch];
      for (let x = 0; x < shape[0]; x += every) {
        pen.fillText(x, left + (x + 0.5) * this.pitch, top - (0.2 + edge[1]) * this.pitch);
      }
      for (let y = 0; y < (shape[1] ?? 0); y += every) {
        pen.fillText(y, left - (0.2 + edge[0]) * this.pitch, top + (y + 0.5) * this.pitch);
      }
      if (layers.length > 1) {
        const middle = left + (shape[0] / 2) * this.pitch;
        pen.fillText(`z = ${z}`, middle, top - (0.7 + edge[1]) * this.pitch);
      }
    });
  }

  cables(pen, damage) {
    const live = new Path2D();
    const failed = new Path2D();
    this.places.cables.forEach(([a, b], cable) => {
      if (damage.chips.has(a) || damage.chips.has(b)) return;
      const path = damage.cables.has(cable) ? failed : live;
      this.line(path, 2 * cable);
      this.line(path, 2 * cable + 1);
    });
    pen.lineWidth = Math.max(0.7, 0.025 * this.pitch);
    pen.strokeStyle = this.colours.link;
    pen.stroke(live);
    pen.lineWidth = Math.max(1.2, 0.045 * this.pitch);
    pen.strokeStyle = this.colours.failed;
    pen.setLineDash([0.09 * this.pitch, 0.07 * this.pitch]);
    pen.stroke(failed);
    pen.setLineDash([]);
  }

  line(path, link) {
    const [ax, ay, bx, by, cx, cy, dx, dy] = this.lines.subarray(8 * link, 8 * link + 8);
    path.moveTo(ax, ay);
    path.lineTo(bx, by);
    path.moveTo(cx, cy);
    path.lineTo(dx, dy);
  }

  hotLinks(pen, { heat, mostHeat }) {
    const paths = Array.from({ length: LEVELS }, () => new Path2D());
    for (let link = 0; link < heat.length; link++) {
      if (!heat[link]) continue;
      const level = Math.round((LEVELS - 1) * Math.min(1, heat[link] / mostHeat));
      this.line(paths[level], link);
    }
    paths.forEach((path, level) => {
      pen.strokeStyle = this.colours.heat[level];
      pen.lineWidth = Math.max(0.8, (0.03 + (0.11 * level) / LEVELS) * this.pitch);
      pen.stroke(path);
    });
  }

  chips(pen, damage) {
    const half = HALF * this.pitch;
    const radius = Math.min(5, 0.1 * this.pitch);
    const live = new Path2D();
    const failed = new Path2D();
    const crosses = new Path2D();
    for (let place = 0; place < this.places.num; place++) {
      const [x, y] = [this.x(place), this.y(place)];
      const isFailed = damage.chips.has(place);
      (isFailed ? failed : live).roundRect(x - half, y - half, 2 * half, 2 * half, radius);
      if (isFailed) {
        const arm = 0.45 * half;
        crosses.moveTo(x - arm, y - arm);
        crosses.lineTo(x + arm, y + arm);
        crosses.moveTo(x - arm, y + arm);
        crosses.lineTo(x + arm, y - arm);
      }
    }
    pen.fillStyle = this.colours.chip;
    pen.fill(live);
    pen.lineWidth = Math.max(1, 0.04 * this.pitch);
    pen.strokeStyle = this.colours.failed;
    pen.stroke(failed);
    pen.lineWidth = Math.max(1.2, 0.07 * this.pitch);
    pen.lineCap = "round";
    pen.stroke(crosses);
    pen.lineCap = "butt";
  }

  // The base, and on it what moves: tokens at `progress` of the round, and the cursor.
  paint({ schedule, hops, round, progress, cursor, isDraft }) {
    const pen = this.context;
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.drawImage(this.base, 0, 0);
    pen.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    if (schedule && !isDraft && progress > 0 && round < schedule.numRounds) {
      this.tokens(pen, schedule, hops, round, progress);
    }
    if (cursor !== null) {
      const half = (HALF + 0.08) * this.pitch;
      pen.strokeStyle = this.colours.cursor;
      pen.lineWidth = 2;
      pen.strokeRect(this.x(cursor) - half, this.y(cursor) - half, 2 * half, 2 * half);
    }
  }

  tokens(pen, schedule, hops, round, progress) {
    const { rows, from, to } = schedule.at(round);
    const radius = Math.max(1.3, Math.min(5, 0.085 * this.pitch));
    const squareSide = Math.max(2, Math.round(2 * radius));
    const isMany = to - from > MANY;
    const paths = [new Path2D(), new Path2D()];
    const eased = progress * progress * (3 - 2 * progress);
    let op = -1;
    for (let row = from; row < to; row++) {
      const first = hops.starts[rows.pair[row]];
      const number = hops.starts[rows.pair[row] + 1] - first;
      const hop = Math.min(number - 1, Math.floor(eased * number));
      const along = 2 * (eased * number - hop);
      const at = 8 * hops.links[first + hop] + (along < 1 ? 0 : 4);
      const t = along < 1 ? along : along - 1;
      const x = this.spans[at] + t * (this.spans[at + 2] - this.spans[at]);
      const y = this.spans[at + 1] + t * (this.spans[at + 3] - this.spans[at + 1]);
      if (isMany) {
        if (op !== rows.op[row]) pen.fillStyle = this.tokenColour((op = rows.op[row]));
        pen.fillRect(Math.round(x - radius), Math.round(y - radius), squareSide, squareSide);
      } else {
        paths[rows.op[row]].moveTo(x + radius, y);
        paths[rows.op[row]].arc(x, y, radius, 0, 7);
      }
    }
    if (isMany) return;
    pen.strokeStyle = this.colours.stage;
    pen.lineWidth = 1;
    paths.forEach((path, kind) => {
      pen.fillStyle = this.tokenColour(kind);
      pen.fill(path);
      pen.stroke(path);
    });
  }

  tokenColour(op) {
    return op ? this.colours.copy : this.colours.add;
  }
}
