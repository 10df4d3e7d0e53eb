// The schedule explorer of the page about schedules: choose sizes, and look at the ticks.
//
// All numbers come from jaxpar's own tables, which docs/site_hooks.py writes into schedules.js:
//
//   SCHEDULES = {sizes: {stages: [2, ...], ...}, kinds: {...}, table: {"1f1b 4 2 2": entry, ...}}
//   entry = [bubble, [units kept on stage 0, ...], transfers, lane, ...]
//   lane = "F0..1|.0..1": its letter, then a row for each stage with a place for each tick, "." for idle.
//          With two groups of layers a place is a unit and the number of its group.
(() => {
  "use strict";
  const ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
  // A lane's half of the tick: a W beside forwards is in the first one.
  const HEIGHT = 26, LABELS = 58, UNIT = 22;

  const svg = (name, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };

  // What a stage does in each half of each tick: [{letter, unit, group}, ...].
  function read(lanes, stages, groups) {
    const halves = [];
    lanes.forEach((lane, number) => {
      const letter = lane[0];
      const half = letter === "F" || (letter === "W" && number === 1) ? 0 : 1;
      lane.slice(1).split("|").forEach((row, stage) => {
        let tick = 0;
        for (let at = 0; at < row.length; at++, tick++) {
          if (row[at] === ".") continue;
          const place = 2 * tick + half;
          while (halves.length <= place) halves.push(Array.from({ length: stages }, () => []));
          const group = groups > 1 ? Number(row[at + 1]) : 0;
          halves[place][stage].push({ letter, unit: ALPHABET.indexOf(row[at]), group });
          if (groups > 1) at++;
        }
      });
    });
    return halves;
  }

  // Stages wait for each other: a half lasts as long as the busiest of them works.
  function draw(choice, entry) {
    const [bubble, , , ...lanes] = entry;
    const cost = { F: 1, B: choice.zb ? 1 : 2, W: 1 };
    const halves = read(lanes, choice.stages, choice.groups);
    const blocks = [], ticks = [];
    let time = 0;
    halves.forEach((stages, place) => {
      if (place % 2 === 0) ticks.push(time);
      let longest = 0;
      stages.forEach((works, stage) => {
        let begin = time;
        for (const work of works) {
          blocks.push({ ...work, stage, begin, cost: cost[work.letter] });
          begin += cost[work.letter];
        }
        longest = Math.max(longest, begin - time);
      });
      time += longest;
    });
    const width = LABELS + UNIT * time + 4, height = HEIGHT * (choice.stages + 1);
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img" });
    picture.append(svg("title", {}, `${choice.name}: bubble ${(100 * bubble).toFixed(1)}%`));
    const apart = Math.max(1, Math.ceil(ticks.length / 24));
    ticks.forEach((begin, tick) => {
      const x = LABELS + UNIT * begin;
      if (tick % apart === 0) picture.append(svg("text", { x: x + 2, y: 16, class: "tick" }, tick));
    });
    for (let stage = 0; stage < choice.stages; stage++) {
      const y = HEIGHT * (stage + 1);
      picture.append(svg("text", { x: 0, y: y + 17, class: "stage" }, `stage ${stage}`));
      picture.append(svg("rect", { x: LABELS, y: y + 1, width: UNIT * time, height: HEIGHT - 2, class: "idle" }));
    }
    for (const block of blocks) {
      const microbatch = Math.floor(block.unit / choice.chunks), chunk = block.unit % choice.chunks;
      const x = LABELS + UNIT * block.begin, y = HEIGHT * (block.stage + 1) + 1;
      const light = 45 + (30 * chunk) / Math.max(choice.chunks - 1, 1);
      const part = svg("g", {});
      const name = `${block.letter}${microbatch}` + (choice.chunks > 1 ? `.${chunk}` : "") +
        (choice.groups > 1 ? `/${block.group}` : "");
      part.append(svg("title", {}, name));
      part.append(svg("rect", {
        x: x + 0.5, y, width: UNIT * block.cost - 1, height: HEIGHT - 2,
        fill: `hsl(${(microbatch * 47 + 210) % 360} 60% ${light}%)`,
      }));
      const foot = { F: "none", B: "rgb(0 0 0 / 55%)", W: "rgb(127 127 127 / 95%)" }[block.letter];
      part.append(svg("rect", { x: x + 0.5, y: y + HEIGHT - 7, width: UNIT * block.cost - 1, height: 5, fill: foot }));
      part.append(svg("text", {
        x: x + (UNIT * block.cost) / 2, y: y + 14, class: "unit", "text-anchor": "middle",
        fill: light > 60 ? "#000" : "#fff",
      }, `${block.letter}${microbatch}`));
      picture.append(part);
    }
    return picture;
  }

  function explore(home) {
    const { sizes, kinds, table } = window.SCHEDULES;
    const form = document.createElement("form"), out = document.createElement("div");
    const facts = document.createElement("p"), inputs = {};
    out.className = "schedule-picture";
    out.tabIndex = 0; // so that keys scroll it
    facts.setAttribute("aria-live", "polite");
    const add = (label, input) => {
      const row = document.createElement("label"), value = document.createElement("output");
      row.append(label, input, value);
      form.append(row);
      return value;
    };
    const select = document.createElement("select");
    for (const name of Object.keys(kinds)) select.append(new Option(name, name));
    select.value = "1f1b";
    inputs.name = select;
    add("schedule", select);
    const shown = {};
    for (const [name, label, start] of
      [["stages", "stages (S)", 2], ["microbatches", "microbatches (M)", 1], ["chunks", "time chunks (K)", 1]]) {
      const slider = Object.assign(document.createElement("input"), {
        type: "range", min: 0, max: sizes[name].length - 1, step: 1, value: start,
      });
      inputs[name] = slider;
      shown[name] = add(label, slider);
    }
    const box = Object.assign(document.createElement("input"), { type: "checkbox", checked: true });
    inputs.zb = box;
    add("zero-bubble", box);

    function look(changed) {
      const kind = kinds[select.value];
      box.disabled = !kind.zb;
      const choice = { name: select.value, groups: kind.groups, zb: box.checked && kind.zb };
      const of = () => {
        for (const name of Object.keys(shown)) choice[name] = sizes[name][inputs[name].value];
        return `${choice.name} ${choice.stages} ${choice.microbatches} ${choice.chunks}${choice.zb ? " zb" : ""}`;
      };
      // The table ends at 32 units: the other slider gives way.
      const other = inputs[changed === "chunks" ? "microbatches" : "chunks"];
      while (!(of() in table)) other.value--;
      for (const name of Object.keys(shown)) shown[name].value = choice[name];
      const entry = table[of()];
      const [bubble, kept, transfers] = entry;
      out.replaceChildren(draw(choice, entry));
      facts.innerHTML = `bubble <b data-what="bubble">${(100 * bubble).toFixed(1)}%</b>, units kept by stage ` +
        `<b data-what="kept">${kept.join(" ")}</b>, transfers <b data-what="transfers">${transfers}</b>`;
    }
    for (const [name, input] of Object.entries(inputs)) input.addEventListener("input", () => look(name));
    form.addEventListener("submit", (event) => event.preventDefault());
    home.replaceChildren(form, facts, out);
    look();
  }

  const begin = () => {
    const home = document.getElementById("schedule-explorer");
    if (home && window.SCHEDULES) explore(home);
  };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
  else begin();
})();
