// Main: what is shown, and every frame of it.

const SPEEDS = [1, 2, 5, 10, 20, 50, 100, 200, 500];
const given = JSON.parse(byId("scenes").textContent);
const still = matchMedia("(prefers-reduced-motion: reduce)");
const painter = new Painter(byId("mesh"));
const chart = new Chart(byId("chart"), (bytes) => pickPayload(bytes));
const frames = new Frames();
const schedules = new WeakMap();

const state = {
  scene: null, // that is shown
  damage: null, // as clicked: {chips, cables}
  isDraft: false, // whether the damage is another than the scene's
  player: null,
  places: null,
  wanted: "auto",
  speed: null, // that was picked, in rounds a second
  payloadBytes: 0,
  cursor: null,
  isChanged: true,
};

let turns = 0; // that something was shown or asked for; only the last counts

async function show(scene, { algorithm = scene.shown } = {}) {
  const turn = ++turns;
  const entry = scene.algorithms.find((one) => one.algorithm === algorithm);
  if (!schedules.has(entry)) schedules.set(entry, await Schedule.read(entry));
  if (turn !== turns) return;
  const places = new Places(scene.mesh, ratio());
  const { shape, failed, failed_links: links } = scene.mesh;
  const chips = new Set(failed.map((coord) => placeOf(coord, shape)));
  const cables = links.map(([a, b]) => places.cableOf(placeOf(a, shape), placeOf(b, shape)));
  const ranks = [...Array(places.num).keys()].filter((place) => !chips.has(place));
  Object.assign(state, { scene, places, damage: { chips, cables: new Set(cables) } });
  state.isDraft = false;
  if (!scene.payloads.includes(state.payloadBytes)) state.payloadBytes = scene.payload_bytes;
  state.player = new Player(schedules.get(entry), places, ranks);
  setSpeed(state.speed ?? state.player.schedule.numRounds / 20);
  if (state.cursor !== null && state.cursor >= places.num) state.cursor = null;
  document.title = `${scene.mesh.name}: ftmesh view`;
  byId("name").textContent = scene.mesh.name;
  byId("chips").textContent = `${count(ranks.length, "live chip")}, ${scene.network}`;
  byId("devices").hidden = scene.mesh.devices_per_chip < 2;
  byId("seek").max = state.player.schedule.numRounds;
  byId("proof").textContent = state.player.schedule.proof;
  byId("payload").max = scene.payloads.length - 1;
  showForm();
  showNotice("");
  resize();
  showNumbers();
  const rounds = count(state.player.schedule.numRounds, "round");
  announce(`${algorithm} on ${scene.mesh.name}: ${rounds}.`);
}

function showNumbers() {
  const { scene, payloadBytes, player, wanted } = state;
  const shown = player.schedule.algorithm;
  showAlgorithms(scene, payloadBytes, wanted, shown, given.plans_at !== null);
  chart.draw(scene, payloadBytes, shown);
  byId("payload").value = scene.payloads.indexOf(payloadBytes);
  byId("payload").setAttribute("aria-valuetext", formatBytes(payloadBytes));
  byId("payload-text").textContent = formatBytes(payloadBytes);
  showRound(scene, player, payloadBytes);
}

function showForm() {
  const request = draftRequest();
  byId("in-mesh").value = request.mesh;
  byId("in-wrap").value = request.wrap;
  byId("in-failed").value = request.failed;
  byId("in-links").value = request.failed_links;
}

function announce(text) {
  byId("status").textContent = text;
}

function setSpeed(speed) {
  const far = (one) => Math.abs(Math.log(one / speed));
  const nearest = SPEEDS.reduce((best, one) => (far(one) < far(best) ? one : best));
  state.player.speed = nearest;
  byId("speed").value = nearest;
}

function play(isPlaying) {
  if (isPlaying && state.isDraft) return;
  if (isPlaying && state.player.atEnd) seek(0);
  state.player.isPlaying = isPlaying;
  if (isPlaying) frames.clear();
  state.isChanged = true;
}

function seek(position) {
  state.player.seek(position);
  state.isChanged = true;
}

function step(by) {
  state.player.isPlaying = false;
  seek(Math.floor(state.player.position) + by);
  const said = showRound(state.scene, state.player, state.payloadBytes);
  announce(`${byId("round").textContent}, ${byId("phase").textContent}. ${said}`);
}

function ratio() {
  return byId("mesh").parentElement.clientWidth / Math.max(240, innerHeight - 260);
}

function resize() {
  state.places = new Places(state.scene.mesh, ratio());
  const width = byId("mesh").parentElement.clientWidth;
  painter.place(state.places, width, Math.max(240, innerHeight - 260));
  repaint();
}

// Once colours, places or the damage have changed.
function repaint() {
  painter.paintGround(state);
  document.body.classList.toggle("draft", state.isDraft);
  byId("play").disabled = state.isDraft;
  state.isChanged = true;
}

let last = null;
let told = { time: 0, phase: "" }; // when, and of which phase

function frame(time) {
  const begin = performance.now();
  const { player } = state;
  const seconds = last === null ? 0 : Math.min(0.1, (time - last) / 1000);
  const wasPlaying = player.isPlaying;
  const moved = wasPlaying && player.advance(seconds);
  if (moved || state.isChanged) drawRound(time, wasPlaying && !player.isPlaying);
  if (wasPlaying || moved || state.isChanged) {
    const within = player.position - player.round;
    const progress = still.matches || (!player.isPlaying && within === 0) ? 0.5 : within;
    const { schedule, hops, round } = player;
    const { cursor, isDraft } = state;
    painter.paint({ schedule, hops, round, progress, cursor, isDraft });
    if (wasPlaying) frames.add(performance.now() - begin, last === null ? null : time - last);
  }
  state.isChanged = false;
  last = time;
  requestAnimationFrame(frame);
}

function drawRound(time, hasEnded) {
  const { player, scene, damage, isDraft } = state;
  const { sums, heat, mostHeat, ranks } = player;
  const devices = scene.mesh.devices_per_chip;
  painter.paintBase({ sums, heat, mostHeat, ranks, damage, isDraft, devices });
  byId("seek").value = player.round;
  byId("seek").setAttribute("aria-valuetext", `round ${player.round}`);
  byId("play").textContent = player.isPlaying ? "Pause" : "Play";
  byId("play").setAttribute("aria-pressed", player.isPlaying);
  if (hasEnded || !player.isPlaying || time - told.time > 150) {
    const said = showRound(scene, player, state.payloadBytes);
    const phase = byId("phase").textContent;
    if (hasEnded || (player.isPlaying && phase !== told.phase)) {
      announce(`${byId("round").textContent}, ${phase}. ${said}`);
    }
    told = { time, phase };
  }
}
