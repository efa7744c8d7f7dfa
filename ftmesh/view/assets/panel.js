// Panel: the text next to the mesh: the algorithms, the round, what is wrong.

const byId = (id) => document.getElementById(id);

function element(kind, text = "", attributes = {}) {
  const node = document.createElement(kind);
  node.textContent = text;
  set(node, attributes);
  return node;
}

// A row for auto, one for each algorithm, and what XLA takes by itself: rounds, time at this
// payload, times the limit, times lax.psum.
function showAlgorithms(scene, payloadBytes, wanted, shown, canPlan) {
  const at = scene.payloads.indexOf(payloadBytes);
  const takes = `takes ${scene.auto} for ${formatBytes(scene.payload_bytes)}`;
  const rows = [choiceRow("auto", wanted, [scene.auto ? takes : "takes the fastest"], 4)];
  const costs = (us) => [
    formatTime(us), (us / scene.limit_us[at]).toFixed(2),
    scene.peers.length ? (us / scene.peers[0].us[at]).toFixed(2) : "",
  ];
  for (const entry of scene.algorithms) {
    if (entry.us) {
      const cells = [counted.format(entry.rounds), ...costs(entry.us[at])];
      rows.push(choiceRow(entry.algorithm, wanted, cells, 1, entry.algorithm === shown));
    } else {
      const missing = canPlan ? "not planned yet" : "not in this file";
      const why = entry.refusal ? `cannot: ${entry.refusal}` : missing;
      rows.push(choiceRow(entry.algorithm, wanted, [why], 4, false, Boolean(entry.refusal)));
    }
  }
  for (const peer of scene.peers) {
    const row = element("tr", "", { title: peer.note });
    const cells = ["", ...costs(peer.us[at])].map((cell) => element("td", cell));
    row.append(element("th", peer.name, { scope: "row" }), ...cells);
    rows.push(row);
  }
  byId("algorithms").replaceChildren(...rows);
  const cut = scene.algorithms.filter((one) => one.cut_by_size).map((one) => one.algorithm);
  byId("limit").textContent = `No all-reduce can take less than ${formatTime(scene.limit_us[at])}: `
    + `${scene.limit_why}. Simulated, in synchronous rounds`
    + (cut.length ? `; ${cut.join(", ")} as cut for ${formatBytes(scene.payload_bytes)}.` : ".");
}

function choiceRow(name, wanted, cells, span, isShown = false, isOff = false) {
  const row = element("tr", "", { class: `${isShown ? "shown" : ""} ${isOff ? "off" : ""}` });
  const head = element("th", "", { scope: "row" });
  const label = element("label");
  const input = element("input", "", { type: "radio", name: "algorithm", value: name });
  input.checked = name === wanted;
  input.disabled = isOff;
  label.append(input, element("span", "", { class: `swatch ${name}` }), name);
  head.append(label);
  row.append(head, ...cells.map((cell) => element("td", cell, { colspan: span })));
  return row;
}

// What is shown, in words and numbers: the canvas for those who do not see it.
function showRound(scene, player, payloadBytes) {
  const { schedule, sums, round, now, mostHeat } = player;
  const phase = schedule.phases[schedule.phaseOf(round)];
  const entry = scene.algorithms.find((one) => one.algorithm === schedule.algorithm);
  const warmest = player.heat.reduce((most, heat) => Math.max(most, heat), 0);
  const rounds = counted.format(schedule.numRounds);
  const share = (chunks) => formatBytes((chunks / schedule.numChunks) * payloadBytes);
  const facts = {
    Algorithm: `${schedule.algorithm}, ${count(schedule.numChunks, "chunk")}`,
    Phase: player.atEnd ? "done" : phase.name,
    Round: `${counted.format(round)} of ${rounds}`,
    "This round": player.atEnd
      ? "nothing is left to send"
      : `${count(now.transfers, "transfer")} (${counted.format(now.adds)} add, `
        + `${counted.format(now.transfers - now.adds)} copy) over ${count(now.links, "link")}`,
    Simulated: `${formatTime(clockAt(scene, entry, player, payloadBytes))} until here, of `
      + formatTime(entry.us[scene.payloads.indexOf(payloadBytes)]),
    "Busiest link": `${share(warmest)} so far, ${share(mostHeat)} in all`,
    Complete: `${counted.format(sums.complete)} of ${counted.format(sums.cells)} chunks at `
      + `${count(sums.numRanks, "chip")}`,
  };
  byId("facts").replaceChildren(
    ...Object.entries(facts).map(([name, value]) => {
      const row = element("tr");
      row.append(element("th", name, { scope: "row" }), element("td", value));
      return row;
    }),
  );
  byId("round").textContent = `Round ${counted.format(round)} of ${rounds}`;
  byId("phase").textContent = player.atEnd ? "done" : phase.name;
  return verdict(player);
}

// What the page's own count says; at the end, whether the sum is whole.
function verdict(player) {
  const { sums, atEnd } = player;
  const whole = sums.complete === sums.cells;
  const node = byId("verdict");
  node.className = atEnd ? (whole ? "good" : "bad") : "";
  if (!atEnd) {
    const percent = (part, all) => `${(Math.floor((1000 * part) / all) / 10).toFixed(1)} %`;
    node.textContent = `${percent(sums.arrived, sums.cells * sums.numRanks)} of the contributions `
      + `have arrived, ${percent(sums.complete, sums.cells)} of the sums are complete.`;
  } else if (whole) {
    node.textContent = `Complete: all ${counted.format(sums.numRanks)} live chips hold the full `
      + "sum of every chunk.";
  } else {
    const lacking = sums.cells - sums.complete;
    node.textContent = `Wrong: ${count(lacking, "chunk")} at chips ended without the full sum.`;
  }
  return node.textContent;
}

// When the round begins, by the simulated end of each phase; within one, as if rounds were alike.
function clockAt(scene, entry, player, payloadBytes) {
  const at = scene.payloads.indexOf(payloadBytes);
  if (player.atEnd) return entry.us[at];
  const index = player.schedule.phaseOf(player.round);
  const { first, rounds } = player.schedule.phases[index];
  const [from, to] = [index ? entry.phase_us[at][index - 1] : 0, entry.phase_us[at][index]];
  return from + ((to - from) * (player.round - first)) / rounds;
}

function chipText(place, mesh, damage, player) {
  const name = `Chip ${formatCoord(place, mesh.shape)}`;
  if (damage.chips.has(place)) return `${name}: failed. Click, or press Space, to restore it.`;
  const rank = player ? player.ranks.indexOf(place) : -1;
  if (rank < 0) return `${name}: live.`;
  const { sums } = player;
  return `${name}, rank ${rank}: ${counted.format(sums.perRank[rank])} of `
    + `${count(sums.numChunks, "chunk")} complete. Click, or press Space, to fail it.`;
}

function cableText([a, b], mesh, isFailed) {
  const name = `Link ${formatCoord(a, mesh.shape)}-${formatCoord(b, mesh.shape)}`;
  return isFailed ? `${name}: failed. Click to restore it.` : `${name}: live. Click to fail it.`;
}

// A message above the mesh: what is under way, or wrong, or what to type.
function showNotice(text, { kind = "", command = "" } = {}) {
  byId("notice").hidden = !text;
  byId("notice").className = kind;
  byId("notice-text").textContent = text;
  byId("command").textContent = command;
  byId("command-line").hidden = !command;
  byId("back").hidden = kind === "busy";
}
