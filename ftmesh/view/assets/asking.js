// Asking: what was clicked or typed; it is at hand, or Python plans it, or a command would.

let asking = false;
let queued = null;

// A chip or a cable fails, or comes back.
function toggle(set, what) {
  if (!set.delete(what)) set.add(what);
  state.player.isPlaying = false;
  state.isDraft = keyOf(draftRequest()) !== keyOf(sceneRequest(state.scene));
  repaint();
  showForm();
  if (state.isDraft) want(draftRequest());
  else backToPlan();
}

function backToPlan() {
  show(state.scene, { algorithm: state.player.schedule.algorithm });
}

function pickPayload(bytes) {
  state.payloadBytes = bytes;
  if (given.plans_at && !state.isDraft && isForAnother(state.scene)) want(draftRequest());
  else showNumbers();
}

function draftRequest() {
  const { mesh } = state.scene;
  const cables = [...state.damage.cables].map((cable) => state.places.cables[cable]);
  const ends = cables.map(([a, b]) => (a < b ? [a, b] : [b, a]));
  return requestFor(mesh, formatFailed(state.damage.chips, mesh.shape),
    formatLinks(ends, mesh.shape));
}

const keyOf = (request) => JSON.stringify(Object.values(request));

function sceneRequest({ mesh }) {
  const failed = mesh.failed.map((coord) => placeOf(coord, mesh.shape));
  const links = mesh.failed_links.map((ends) => ends.map((end) => placeOf(end, mesh.shape)));
  const sorted = links.map(([a, b]) => (a < b ? [a, b] : [b, a]));
  return requestFor(mesh, formatFailed(failed, mesh.shape), formatLinks(sorted, mesh.shape));
}

// Show what is asked for: it is at hand, or Python plans it, or the page says with what command.
function want(request) {
  const nameIn = (scene) => (state.wanted === "auto" ? scene.auto : state.wanted);
  const has = (scene) =>
    scene.algorithms.some((entry) => entry.algorithm === nameIn(scene) && entry.schedule);
  const ready = [state.scene, ...given.scenes].find(
    (scene) => keyOf(sceneRequest(scene)) === keyOf(request) && has(scene),
  );
  if (ready && !(given.plans_at && isForAnother(ready))) {
    show(ready, { algorithm: nameIn(found) });
  } else if (given.plans_at) {
    ask({ ...request, algorithm: state.wanted, payload_bytes: state.payloadBytes });
  } else {
    const isSaved = state.scene.auto === null; // under a name that no planner may have
    const chosen = state.wanted === "auto" || isSaved ? "" : `--algorithm ${quoted(state.wanted)}`;
    const options = [chosen, given.options].filter(Boolean).join(" ");
    showNotice("This file does not hold that plan. This command makes one that does, and "
      + "ftmesh view --serve plans as you click:",
      { command: commandFor(request, state.payloadBytes, options) });
    announce("This file does not hold that plan.");
  }
}

// Auto chooses for a payload, and trees are cut for one: another asks for another schedule.
function isForAnother(scene) {
  const name = state.wanted === "auto" ? scene.auto : state.wanted;
  const entry = scene.algorithms.find((one) => one.algorithm === name);
  const depends = state.wanted === "auto" || entry?.cut_by_size;
  return depends && scene.payload_bytes !== state.payloadBytes;
}

// One request at a time; of those that come meanwhile, the last.
async function ask(request) {
  queued = request;
  if (asking) return;
  asking = true;
  while (queued) {
    const now = queued;
    const turn = ++turns;
    queued = null;
    showNotice("Planning …", { kind: "busy" });
    const answer = await post(now);
    if (queued || turn !== turns) continue; // something else is shown by now
    if (answer.error) {
      showNotice(answer.error, { kind: "bad" });
      announce(answer.error);
    } else {
      await show(answer);
    }
  }
  asking = false;
}

async function post(request) {
  try {
    const answer = await fetch(given.plans_at, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(request),
    });
    return await answer.json();
  } catch {
    return { error: "The server does not answer: start ftmesh view --serve again." };
  }
}
