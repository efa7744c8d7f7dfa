// Events: the mouse, the keyboard and the controls; and what tests may look at.

const mesh = byId("mesh");
let errors = 0;
const STEPS = {
  ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 1], ArrowUp: [1, -1],
  PageUp: [2, 1], PageDown: [2, -1],
};

function at(event) {
  const box = mesh.getBoundingClientRect();
  return painter.hit(event.clientX - box.left, event.clientY - box.top);
}

function tell(what) {
  const { scene, damage, player, isDraft, places } = state;
  const shown = isDraft ? null : player;
  if (what?.chip !== undefined) return chipText(what.chip, scene.mesh, damage, shown);
  if (!what) return "Click a chip or a link to fail it; click it again to restore it.";
  return cableText(places.cables[what.cable], scene.mesh, damage.cables.has(what.cable));
}

function change(what) {
  if (!what) return;
  if (what.chip !== undefined) toggle(state.damage.chips, what.chip);
  else toggle(state.damage.cables, what.cable);
}

mesh.addEventListener("click", (event) => change(at(event)));
mesh.addEventListener("mousemove", (event) => {
  const what = at(event);
  mesh.classList.toggle("on", Boolean(what));
  byId("pointed").textContent = tell(what);
});
mesh.addEventListener("mouseleave", () => (byId("pointed").textContent = tell(null)));
mesh.addEventListener("blur", () => {
  state.cursor = null;
  state.isChanged = true;
});
mesh.addEventListener("keydown", (event) => {
  const [axis, by] = STEPS[event.key] ?? [];
  if (axis !== undefined && axis < state.places.shape.length) {
    const there = state.cursor === null ? 0 : state.places.neighbour(state.cursor, axis, by);
    if (there !== null && event.shiftKey && state.cursor !== null) {
      change({ cable: state.places.cableOf(state.cursor, there) });
    } else if (there !== null) {
      state.cursor = there;
      announce(tell({ chip: there }));
      byId("pointed").textContent = tell({ chip: there });
    }
  } else if ((event.key === " " || event.key === "Enter") && state.cursor !== null) {
    change({ chip: state.cursor });
  } else if (event.key === "p") {
    play(!state.player.isPlaying);
  } else {
    return;
  }
  state.isChanged = true;
  event.preventDefault();
});

byId("play").addEventListener("click", () => play(!state.player.isPlaying));
byId("first").addEventListener("click", () => step(-Infinity));
byId("back-one").addEventListener("click", () => step(-1));
byId("on-one").addEventListener("click", () => step(1));
byId("last").addEventListener("click", () => step(Infinity));
byId("seek").addEventListener("input", (event) => {
  state.player.isPlaying = false;
  seek(Number(event.target.value));
});
byId("speed").append(
  ...SPEEDS.map((speed) => element("option", `${count(speed, "round")}/s`, { value: speed })),
);
byId("speed").addEventListener("change", (event) => {
  state.speed = Number(event.target.value);
  setSpeed(state.speed);
});
byId("payload").addEventListener("input", (event) => {
  state.payloadBytes = state.scene.payloads[Number(event.target.value)];
  showNumbers();
});
byId("payload").addEventListener("change", () => pickPayload(state.payloadBytes));
byId("algorithms").addEventListener("change", (event) => {
  state.wanted = event.target.value;
  want(draftRequest());
});
byId("damage").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = (id) => byId(id).value.replace(/\s/g, "");
  want({
    mesh: text("in-mesh"),
    wrap: text("in-wrap"),
    failed: text("in-failed"),
    failed_links: text("in-links"),
    devices_per_chip: state.scene.mesh.devices_per_chip,
  });
});
byId("back").addEventListener("click", backToPlan);
byId("copy").addEventListener("click", async () => {
  await navigator.clipboard?.writeText(byId("command").textContent).catch(() => {});
  announce("Copied.");
});
byId("theme").addEventListener("click", () => {
  const { dataset } = document.documentElement;
  const isDark = dataset.theme
    ? dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  dataset.theme = isDark ? "light" : "dark";
  recolour();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
addEventListener("resize", () => state.scene && resize());
addEventListener("error", () => errors++);
addEventListener("unhandledrejection", () => errors++);

function recolour() {
  painter.colours = readColours();
  repaint();
}

// For tests: where things stand, and the page's own counts.
window.ftmesh = {
  state: () => ({
    mesh: state.scene?.mesh.name,
    algorithm: state.player?.schedule.algorithm,
    round: state.player?.round,
    rounds: state.player?.schedule.numRounds,
    complete: state.player?.sums.complete,
    cells: state.player?.sums.cells,
    busiest_share: state.player && state.player.mostHeat / state.player.schedule.numChunks,
    is_playing: state.player?.isPlaying,
    is_draft: state.isDraft,
    is_asking: asking,
    errors,
  }),
  frames: () => frames.summary(),
  chip: (...coord) => point(placeOf(coord, state.places.shape)),
  link: (a, b) => {
    const link = state.places.linkId(...[a, b].map((end) => placeOf(end, state.places.shape)));
    const box = mesh.getBoundingClientRect();
    const [x, y] = painter.spans.subarray(8 * link + 2, 8 * link + 4);
    return [box.left + x, box.top + y];
  },
};

function point(place) {
  const box = mesh.getBoundingClientRect();
  return [box.left + painter.x(place), box.top + painter.y(place)];
}

byId("pointed").textContent = "Click a chip or a link to fail it; click it again to restore it.";
if (given.scenes[0].shown !== given.scenes[0].auto) state.wanted = given.scenes[0].shown;
show(given.scenes[0]).then(() => requestAnimationFrame(frame));
