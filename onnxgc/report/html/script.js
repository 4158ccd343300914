// Makes the page's pictures interactive; the page is readable without it.
// One file of more than 450 lines, since the page contains it as one script with one hash.
"use strict";
(() => {
  // As in svg.py, curves.py and network_strip.py.
  const WIDTH = 1000;
  const HEIGHT = 300, LANE = 14;
  const ARCS = 80, MARKS = 18, BARS = 90, SEGMENTS = 18, MAX_ARCS = 1500;
  const BOTTOM = ARCS + MARKS + BARS;
  // Rows of the table of tensors while a pointer moves, and after it stops.
  const FEW = 30;
  const MANY = 1000;

  const megabytes = (bytes) => {
    if (!bytes) return "0";
    if (bytes < 1000) return `${bytes} B`;
    const size = bytes / 1e6;
    const digits = size >= 100 ? 0 : size >= 1 ? 1 : 3;
    return size.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }) + " MB";
  };
  // The index of the first of the largest values from `low` up to `high`.
  function largestIn(values, low, high) {
    let best = low;
    for (let index = low; index < high; index++) if (values[index] > values[best]) best = index;
    return best;
  }

  const count = (value) => value.toLocaleString("en-US");
  // Places are counted from 0, and shown from 1.
  const numbered = (place) => count(place + 1);
  const short = (value) => String(Math.round(value * 10) / 10);

  function make(name, attributes = {}, ...children) {
    const isDrawn = ["svg", "rect", "line", "g"].includes(name);
    const made = isDrawn ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    set(made, attributes);
    made.append(...children);
    return made;
  }

  function set(element, attributes) {
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  }

  const named = (text) => make("span", { class: "name" }, text);
  // The parts of a cell: a name, and the module below it.
  const inModule = (text, module) => module ? [named(text), "\n", make("span", { class: "name module" }, module)] : [named(text)];
  const swatch = (kind) => make("svg", { class: "swatch", width: 14, height: 14, "aria-hidden": "true" },
    make("rect", { width: 14, height: 14, class: `area ${kind}` }));

  // The places from `low` up to `high`, gathered into columns no narrower than a unit of the picture.
  function columns(low, high) {
    const number = Math.min(high - low, WIDTH);
    return Array.from({ length: number }, (_, place) => [
      low + Math.floor(place * (high - low) / number), low + Math.floor((place + 1) * (high - low) / number)]);
  }

  function stepsPath(heights, edges) {
    let path = "", before = null;
    heights.forEach((height, number) => {
      const y = short(height);
      if (y === before) return;
      path += before === null ? `M${short(edges[number])} ${y}` : `H${short(edges[number])}V${y}`;
      before = y;
    });
    return path && path + `H${short(edges[heights.length])}`;
  }

  function blocksPath(filled, edges, top, height) {
    let path = "", start = null;
    [...filled, false].forEach((is, number) => {
      if (is && start === null) start = number;
      if (!is && start !== null) {
        path += `M${short(edges[start])} ${top}H${short(edges[number])}v${height}H${short(edges[start])}Z`;
        start = null;
      }
    });
    return path;
  }

  // A picture whose places can be selected by pointer or keyboard, and zoomed.
  class Explorer {
    constructor(figure, label, unit) {
      this.figure = figure;
      this.unit = unit;
      this.plot = figure.querySelector("svg.plot");
      this.marks = [...figure.querySelectorAll("text.mark")];
      const height = this.plot.querySelector("svg").getAttribute("height");
      this.cursor = make("line", { class: "cursor", y1: 0, y2: height, x1: 0, x2: 0, visibility: "hidden" });
      this.selection = make("rect", { class: "selection", y: 0, height, visibility: "hidden" });
      this.plot.append(this.selection, this.cursor);
      this.handle = make("div", { class: "handle", tabindex: 0, role: "slider", "aria-label": label, "aria-valuemin": 1 });
      this.plot.before(this.handle);
      this.handle.append(this.plot);
      this.live = make("p", { class: "unseen", "aria-live": "polite" });
      this.toolbar = make("div", { class: "toolbar" });
      figure.prepend(this.toolbar);
      figure.append(this.live);
      for (const [text, action] of [["Zoom in", () => this.zoom(0.5)], ["Zoom out", () => this.zoom(2)],
        ["Show all", () => this.show(0, this.wide)]]) {
        const button = make("button", { type: "button" }, text);
        button.addEventListener("click", action);
        this.toolbar.append(button);
      }
      const keys = figure.querySelector(".keys");
      keys.hidden = false;
      keys.id = `${figure.id}-keys`;
      this.handle.setAttribute("aria-describedby", keys.id);
      this.listen();
    }

    // A line of text about the selected place.
    addReadout() {
      this.readout = make("p", { class: "readout" });
      this.figure.querySelector("figcaption").before(this.readout);
    }

    // Places are 0 to size - 1; the picture shows `wide` of them, some perhaps empty.
    begin(size, at, wide = size) {
      this.size = size;
      this.wide = Math.max(wide, 1);
      this.at = at;
      set(this.handle, { "aria-valuemax": size, "aria-valuenow": at + 1, "aria-valuetext": this.text(at) });
      this.show(0, this.wide);
    }

    show(low, high) {
      const wide = Math.max(Math.min(Math.round(high - low), this.wide), Math.min(4, this.wide));
      this.low = Math.max(0, Math.min(Math.round(low), this.wide - wide));
      this.high = this.low + wide;
      this.draw(this.low, this.high);
      this.marks.forEach((mark, number) => {
        const place = Math.min(this.low + Math.floor(wide * number / 4), this.high - 1);
        mark.textContent = number ? numbered(place) : `${this.unit} ${numbered(place)}`;
      });
      this.place();
    }

    zoom(factor) {
      const wide = (this.high - this.low) * factor;
      this.show(this.at + 0.5 - wide / 2, this.at + 0.5 + wide / 2);
    }

    place() {
      const x = 100 * (this.at + 0.5 - this.low) / (this.high - this.low);
      set(this.cursor, { x1: `${x}%`, x2: `${x}%`, visibility: x >= 0 && x <= 100 ? "visible" : "hidden" });
    }

    go(at, isSpoken) {
      if (!this.size) return;
      this.at = Math.max(0, Math.min(this.size - 1, at));
      if (this.at < this.low || this.at >= this.high) {
        const half = (this.high - this.low) / 2;
        this.show(this.at - half, this.at + half);
      }
      this.place();
      cancelAnimationFrame(this.frame);
      this.frame = requestAnimationFrame(() => this.showAt(this.at));
      if (isSpoken) {
        set(this.handle, { "aria-valuenow": this.at + 1, "aria-valuetext": this.text(this.at) });
        clearTimeout(this.timer);
        this.timer = setTimeout(() => { this.live.textContent = this.spoken(this.at); }, 300);
      }
    }

    share(event) {
      const box = this.plot.getBoundingClientRect();
      return Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
    }

    listen() {
      let began = null;
      const at = (event) => this.low + this.share(event) * (this.high - this.low);
      const select = (from, to) => {
        const width = Math.abs(to - from), visibility = width > 0.02 ? "visible" : "hidden";
        set(this.selection, { x: `${100 * Math.min(from, to)}%`, width: `${100 * width}%`, visibility });
      };
      this.plot.addEventListener("pointerdown", (event) => {
        if (event.pointerType === "mouse" && event.button === 0) began = this.share(event);
        this.go(Math.floor(at(event)), false);
      });
      this.plot.addEventListener("pointermove", (event) => {
        this.go(Math.floor(at(event)), false);
        if (began !== null) select(began, this.share(event));
      });
      window.addEventListener("pointerup", (event) => {
        if (began === null) return;
        const ends = [began, this.share(event)].sort((a, b) => a - b);
        began = null;
        select(0, 0);
        const wide = this.high - this.low;
        if (ends[1] - ends[0] > 0.02) this.show(this.low + ends[0] * wide, this.low + ends[1] * wide);
      });
      this.plot.addEventListener("dblclick", () => this.show(0, this.wide));
      this.handle.addEventListener("keydown", (event) => {
        if (event.ctrlKey || event.metaKey || event.altKey) return;
        const far = Math.max(1, Math.round((this.high - this.low) / 20));
        const moves = {
          ArrowLeft: this.at - 1, ArrowRight: this.at + 1, ArrowDown: this.at - 1, ArrowUp: this.at + 1,
          PageUp: this.at - far, PageDown: this.at + far, Home: 0, End: this.size - 1,
        };
        const others = { "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2),
          "0": () => this.show(0, this.wide), ...this.keys };
        const key = event.key.toLowerCase();
        if (event.key in moves) this.go(moves[event.key], true);
        else if (key in others) others[key]();
        else return;
        event.preventDefault();
      });
    }
  }

  // Memory over the step.
  class Memory extends Explorer {
    constructor(figure, data) {
      super(figure, "Step of the schedule", "step");
      this.data = data;
      const { courses, table } = figure.dataset;
      this.courses = courses.split(" ").map((place) => this.summed(data.courses[place]));
      this.longest = Math.max(...this.courses.map((course) => course.size));
      this.highest = Number(figure.dataset.highest);
      this.peak = this.plot.querySelector("circle.peak");
      this.peakLabel = this.plot.querySelector("text.peak-label");
      this.table = table ? document.getElementById(table) : null;
      if (!this.table) this.addReadout();
      this.shown = figure.querySelector(".shown");
      this.keys = { p: () => this.go(this.course.peakAt, true) };
      this.chooser();
      this.choose(0);
    }

    // Bytes of each run: by role, added up from the first role to the last, and in all.
    summed(course) {
      const size = course.name.length;
      const tops = this.data.roles.map(() => new Float64Array(size + 1));
      course.first.forEach((first, life) => {
        const change = tops[course.role[life]];
        change[first] += course.bytes[life];
        change[course.last[life] + 1] -= course.bytes[life];
      });
      tops.forEach((top, role) => {
        for (let run = 1; run <= size; run++) top[run] += top[run - 1];
        top.isUsed = top.some((bytes) => bytes > 0);
        if (role) for (let run = 0; run <= size; run++) top[run] += tops[role - 1][run];
      });
      const total = tops[tops.length - 1];
      const peakAt = largestIn(total, 0, size);
      return { ...course, size, tops, total, peakAt, peak: size ? total[peakAt] : 0 };
    }

    chooser() {
      const field = make("fieldset", {}, make("legend", {}, "Show"));
      this.courses.forEach((course, number) => {
        const radio = make("input", { type: "radio", name: `course of ${this.figure.id}` });
        radio.checked = number === 0;
        radio.addEventListener("change", () => this.choose(number));
        field.append(make("label", {}, radio, ` ${course.label}`));
      });
      this.toolbar.prepend(field);
    }

    choose(number) {
      this.course = this.courses[number];
      this.shown.textContent = this.course.label;
      // The picture is as wide as the longest course, whichever is shown.
      this.begin(this.course.size, this.course.peakAt, this.longest);
      this.showAt(this.at);
    }

    draw(low, high) {
      const y = (bytes) => HEIGHT * (1 - bytes / this.highest);
      const x = (run) => WIDTH * (run - low) / (high - low);
      const layout = (course) => {
        const places = columns(low, Math.max(low, Math.min(high, course.size)));
        const highest = places.map(([first, end]) => largestIn(course.total, first, end));
        return { places, highest, edges: [...places.map(([first]) => x(first)), x(places.length ? places.at(-1)[1] : low)] };
      };
      const { places, highest, edges } = layout(this.course);
      for (const area of this.plot.querySelectorAll("path.area")) {
        const top = this.course.tops[area.dataset.role];
        const line = top.isUsed ? stepsPath(highest.map((run) => y(top[run])), edges) : "";
        area.setAttribute("d", line && `${line}V${HEIGHT}H0Z`);
      }
      for (const line of this.plot.querySelectorAll("path.line")) {
        const course = this.courses[line.dataset.course];
        const drawn = layout(course);
        line.setAttribute("d", stepsPath(drawn.highest.map((run) => y(course.total[run])), drawn.edges));
      }
      for (const lane of this.figure.querySelectorAll("path.lane")) {
        const phase = Number(lane.dataset.phase);
        const filled = places.map(([first, end]) => this.course.phase.slice(first, end).includes(phase));
        lane.setAttribute("d", blocksPath(filled, edges, phase * LANE + 1, LANE - 2));
      }
      const { peakAt, peak } = this.course;
      const share = (peakAt + 0.5 - low) / (high - low), left = `${100 * share}%`;
      const visibility = peakAt >= low && peakAt < high ? "visible" : "hidden";
      const [dx, anchor] = share > 0.5 ? [-6, "end"] : [6, "start"];
      set(this.peak, { cx: left, cy: y(peak), visibility });
      set(this.peakLabel, { x: left, y: y(peak) - 8, dx, "text-anchor": anchor, visibility });
      this.peakLabel.textContent = `peak ${megabytes(peak)}`;
    }

    alive(run) {
      const { first, last, bytes } = this.course;
      const found = [];
      for (let life = 0; life < first.length && first[life] <= run; life++) if (last[life] >= run) found.push(life);
      return found.sort((a, b) => bytes[b] - bytes[a] || a - b);
    }

    runText(run) {
      const { course, data } = this;
      const source = data.texts[course.source[run]];
      const phase = data.phases[course.phase[run]];
      const reason = phase === "forward" ? "in forward"
        : phase === "backward" ? `in the backward of '${source}'` : `which recomputes '${source}'`;
      const module = data.texts[course["module of run"][run]];
      return `${data.texts[course.kind[run]]} '${data.texts[course.name[run]]}'${module && ` in '${module}'`} ${reason}`;
    }

    text(run) {
      return `step ${numbered(run)}, ${megabytes(this.course.total[run])}`;
    }

    spoken(run) {
      const { data, course } = this;
      const largest = this.alive(run).slice(0, 3)
        .map((life) => `${data.texts[course.tensor[life]]}, ${megabytes(course.bytes[life])}, ${data.roles[course.role[life]]}`);
      return `Step ${numbered(run)} of ${count(course.size)}: ${this.runText(run)}; ${megabytes(course.total[run])} live. `
        + `Largest: ${largest.join("; ")}.`;
    }

    showAt(run) {
      if (this.readout) {
        this.readout.textContent = this.spoken(run);
        return;
      }
      this.list(run, FEW);
      clearTimeout(this.rest);
      this.rest = setTimeout(() => this.list(run, MANY), 150);
    }

    list(run, most) {
      const { data, course } = this;
      const alive = this.alive(run);
      const row = (life) => make("tr", {},
        make("th", { scope: "row" }, ...inModule(data.texts[course.tensor[life]], data.texts[course.module[life]])),
        make("td", {}, data.texts[course.form[life]]),
        make("td", {}, swatch(`role-${course.role[life]}`), `\n${data.roles[course.role[life]]}`),
        make("td", { class: "number", "data-value": course.bytes[life] }, megabytes(course.bytes[life])),
        make("td", {}, `${numbered(course.first[life])} to ${numbered(course.last[life])}`));
      const sum = (lives) => lives.reduce((total, life) => total + course.bytes[life], 0);
      const summary = (text, bytes) => make("tr", {}, make("th", { scope: "row" }, text), make("td"), make("td"),
        make("td", { class: "number", "data-value": bytes }, megabytes(bytes)), make("td"));
      const rows = alive.slice(0, most).map(row);
      const left = alive.slice(most);
      if (left.length) rows.push(summary(`${count(left.length)} more`, sum(left)));
      const table = this.table.querySelector("table");
      table.tBodies[0].replaceChildren(...rows);
      table.tFoot.replaceChildren(summary("all", sum(alive)));
      const peak = run === course.peakAt ? ", the peak" : "";
      table.caption.firstChild.textContent = `Live at step ${numbered(run)} of ${count(course.size)} (${course.label}${peak}): ${this.runText(run)}`;
      this.table.setAttribute("aria-label", table.caption.textContent);
      this.table.dataset.step = run;
    }
  }

  // The network's operators.
  class Network extends Explorer {
    constructor(figure, data) {
      super(figure, "Operator of the network", "operator");
      this.data = data;
      this.network = data.network;
      this.largest = this.network.bytes[largestIn(this.network.bytes, 0, this.network.bytes.length)] || 1;
      this.arcs = [];
      this.network.reads.forEach((sources, reader) => {
        for (const source of sources) if (reader - source > 1) this.arcs.push([source, reader]);
      });
      this.arcs.sort((a, b) => (b[1] - b[0]) - (a[1] - a[0]) || a[0] - b[0]);
      let number = -1;
      this.parity = this.network.segment.map((segment, index, segments) => {
        if (segment >= 0 && segment !== segments[index - 1]) number++;
        return segment < 0 ? -1 : number % 2;
      });
      this.addReadout();
      this.keys = { c: () => this.next() };
      this.begin(this.network.name.length, 0);
      this.showAt(0);
    }

    next() {
      const { checkpoint } = this.network;
      const later = checkpoint.indexOf(1, this.at + 1);
      const found = later >= 0 ? later : checkpoint.indexOf(1);
      if (found >= 0) this.go(found, true);
    }

    draw(low, high) {
      const { bytes, fate, checkpoint } = this.network;
      const places = columns(low, high);
      const edges = [...places.map(([first]) => WIDTH * (first - low) / (high - low)), WIDTH];
      const bars = {};
      places.forEach(([first, end], number) => {
        const best = largestIn(bytes, first, end);
        if (!bytes[best]) return;
        const top = BOTTOM - BARS * bytes[best] / this.largest;
        bars[fate[best]] = (bars[fate[best]] || "")
          + `M${short(edges[number])} ${BOTTOM}V${short(top)}H${short(edges[number + 1])}V${BOTTOM}Z`;
      });
      for (const area of this.plot.querySelectorAll("path[data-fate]")) area.setAttribute("d", bars[area.dataset.fate] || "");
      const isAny = (values, wanted) => places.map(([first, end]) => values.slice(first, end).includes(wanted));
      for (const path of this.plot.querySelectorAll("path[data-parity]")) {
        path.setAttribute("d", blocksPath(isAny(this.parity, Number(path.dataset.parity)), edges, BOTTOM + 4, SEGMENTS - 4));
      }
      const marks = isAny(checkpoint, 1).map((is, number) => is ? `M${short((edges[number] + edges[number + 1]) / 2)} ${ARCS + 2}v${MARKS - 4}` : "");
      this.plot.querySelector(".checkpoints").setAttribute("d", marks.join(""));
      const unit = WIDTH / (high - low);
      let arcs = "", drawn = 0;
      for (const [source, reader] of this.arcs) {
        if (reader < low || source >= high || (reader - source) * unit < 0.5) continue;
        const [left, right] = [source, reader].map((index) => short((index + 0.5 - low) * unit));
        const top = short(ARCS - 1.3 * ARCS * Math.log(1 + reader - source) / Math.log(1 + this.size));
        arcs += `M${left} ${ARCS}C${left} ${top} ${right} ${top} ${right} ${ARCS}`;
        if (++drawn === MAX_ARCS) break;
      }
      this.plot.querySelector(".arcs").setAttribute("d", arcs);
    }

    text(index) {
      return `operator ${numbered(index)}, ${this.data.texts[this.network.kind[index]]}`;
    }

    described(index) {
      const { network, data } = this;
      const module = data.texts[network.module[index]];
      const again = network.again[index] > 1 ? `, ${network.again[index]} times` : "";
      const parts = [
        `Operator ${numbered(index)} of ${count(this.size)}: ${data.texts[network.kind[index]]} `,
        named(data.texts[network.name[index]]), module && ` in '${module}'`, " outputs ", named(data.texts[network.tensor[index]]),
        ` (${data.texts[network.form[index]]}, ${megabytes(network.bytes[index])}), ${data.fates[network.fate[index]]}${again}`,
      ];
      if (network.segment[index] >= 0) parts.push(`, in segment ${network.segment[index]}`);
      if (network.checkpoint[index]) parts.push(", a checkpoint");
      return [...parts, "."];
    }

    spoken(index) {
      return this.described(index).map((part) => part.textContent ?? part).join("");
    }

    showAt(index) {
      this.readout.replaceChildren(...this.described(index));
    }
  }

  function makeSortable(table) {
    [...table.tHead.rows[0].cells].forEach((cell, column) => {
      const button = make("button", { type: "button", class: "sort" }, cell.textContent);
      cell.replaceChildren(button);
      button.addEventListener("click", () => {
        const isDown = cell.getAttribute("aria-sort") !== "descending" && cell.classList.contains("number");
        const isUp = cell.getAttribute("aria-sort") === "ascending";
        const sign = isDown || isUp ? -1 : 1;
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        cell.setAttribute("aria-sort", sign < 0 ? "descending" : "ascending");
        const key = (row) => row.cells[column].dataset.value;
        const compare = (a, b) => key(a) === undefined
          ? a.cells[column].textContent.localeCompare(b.cells[column].textContent, "en") : key(a) - key(b);
        const rows = [...table.tBodies[0].rows].sort((a, b) => sign * compare(a, b));
        table.tBodies[0].append(...rows);
      });
    });
  }

  async function read() {
    const text = document.getElementById("data").textContent;
    const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return JSON.parse(await new Response(stream).text());
  }

  async function begin() {
    document.querySelectorAll("table.sortable").forEach(makeSortable);
    if (!window.DecompressionStream) return;
    const data = await read();
    for (const figure of document.querySelectorAll("figure.memory")) new Memory(figure, data);
    const network = document.getElementById("network");
    if (network) new Network(network, data);
    document.documentElement.dataset.ready = "yes";
  }

  begin();
})();
