// Rows of cells on a canvas: one byte a cell, one color a code. No dependencies, no build step.
//
//   model (Python) --read()--> rows, colors --draw()--> canvas
//   wheel, pointer, keys ----> view, cursor, selected --report()--> model
//
// Cells are numbered from 0 in each row; `view` is [first, last) in cells, as floats. Where several
// cells share a pixel, it shows the most frequent code (the lower one of two), or the highest.
// An axis in seconds can be played: what is after `clock`, in seconds of the axis, is pale.

const GAP_PX = 1, AXIS_PX = 24, BAR_PX = 6, ROW_PX = [5, 24], TALLEST_PX = 340;
const HOVER_MS = 150, VIEW_MS = 250, WHEEL_MS = 300;
const PLAY_MS = 15000, LONGEST_FRAME_MS = 100, CALM_MS = 1000, LATER_ALPHA = 0.15;
const HELP = "Point at a cell to read it. Zoom: wheel, W, S. Move: drag, A, D, arrow keys. " +
  "Select: click, Enter. Whole view: 0.";
const STYLE = `
.strip { font-size: 13px; line-height: 1.4; color: inherit; transition: color 1ms; }
.strip header { display: flex; flex-wrap: wrap; gap: 2px 12px; align-items: baseline; }
.strip h4 { margin: 0; font-size: 14px; font-weight: 600; flex: 1 1 auto; }
.strip header span { white-space: nowrap; }
.strip button { font: inherit; margin-left: 6px; min-width: 26px; padding: 0 6px; color: inherit; cursor: pointer;
  background: transparent; border: 1px solid; border-radius: 4px; opacity: 0.75; }
.strip ul { display: flex; flex-wrap: wrap; gap: 0 14px; margin: 2px 0 4px; padding: 0; list-style: none; }
.strip li { display: flex; align-items: center; gap: 5px; margin: 0; }
.strip i { display: inline-block; width: 22px; height: 12px; }
.strip canvas { display: block; width: 100%; touch-action: pan-y; cursor: crosshair; border-radius: 2px; }
.strip canvas:focus-visible, .strip button:focus-visible { outline: 2px solid #3a8dde; outline-offset: 2px; }
.strip p { margin: 2px 0 0; min-height: 1.4em; overflow-wrap: anywhere; }
.strip .note { opacity: 0.7; font-size: 12px; min-height: 0; }`;
const PATTERNS = {  // is pixel (x, y) part of a line? p: distance of lines, w: their width
  "/": (x, y, p, w) => (x + y) % p < w,
  "\\": (x, y, p, w) => (x - y + 4096 * p) % p < w,
  "x": (x, y, p, w) => (x + y) % p < w || (x - y + 4096 * p) % p < w,
  "-": (x, y, p, w) => y % p < w,
  "|": (x, y, p, w) => x % p < w,
  "+": (x, y, p, w) => x % p < w || y % p < w,
  ".": (x, y, p, w) => x % p < 2 * w && y % p < 2 * w,
};

const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
const bytes = (data) => data instanceof ArrayBuffer ? new Uint8Array(data)
  : new Uint8Array(data.buffer, data.byteOffset, data.byteLength);

function element(parent, name, properties = {}, attributes = {}) {
  const made = Object.assign(document.createElement(name), properties);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return parent.appendChild(made);
}

function render({ model, el }) {
  const get = (name) => model.get(name);
  const root = element(el, "div", { className: "strip" });
  element(root, "style", { textContent: STYLE });
  const header = element(root, "header"), title = element(header, "h4");
  const legend = element(root, "ul", {}, { "aria-label": "colors" });
  const saysId = `strip-${Math.random().toString(36).slice(2)}`;
  const canvas = element(root, "canvas", { tabIndex: 0 }, {
    role: "application", "aria-roledescription": "rows of cells", "aria-describedby": saysId });
  const says = element(root, "p", { id: saysId, className: "says" }, { "aria-live": "polite" });
  const note = element(root, "p", { className: "note" });
  const buttons = element(header, "span");
  const player = element(buttons, "button", { type: "button", onclick: () => playing ? pause() : play() });
  for (const [text, label, act] of [
    ["+", "zoom in", () => zoom(0.5)], ["−", "zoom out", () => zoom(2)], ["all", "whole view", whole]]) {
    element(buttons, "button", { type: "button", textContent: text, title: label, onclick: act },
      { "aria-label": label });
  }
  const context = canvas.getContext("2d");
  const pixel = Object.assign(document.createElement("canvas"), { width: 1, height: 1 })
    .getContext("2d", { willReadFrequently: true });  // reads colors in any notation
  let rows = [], longest = 1, texts = [], colors = [], looks = [], shape = {};
  let themed = "", first = 0, last = 1, top = 0, cursor = null, selected = null, byPointer = false;
  let clock = null, playing = false, since = 0, frame = 0;

  // --- data and colors -------------------------------------------------------------------------
  function read() {
    const cells = bytes(get("_cells")), ends = new Int32Array(bytes(get("_ends")).slice().buffer);
    rows = Array.from(ends, (end, row) => cells.subarray(row ? ends[row - 1] : 0, end));
    longest = Math.max(1, ...rows.map((row) => row.length));
    texts = get("_texts").map((text) => text === "" ? null : text);  // split when first needed
    colors = get("_colors");
    title.textContent = get("_title");
    canvas.setAttribute("aria-label", get("_alt"));
    readView();
    readSelected();
    cursor = cursor && exists(cursor) ? cursor : null;
    themed = "";
    if (!timed() || !rows.length || clock < get("_start") || clock > timeOf(longest)) rewind();
    showPlayer();
    say();
  }
  function readView() {
    const [from, to] = get("view") ?? [];
    [first, last] = Number.isFinite(from) && to > from ? [from, to] : [0, longest];
    settle();
  }
  function readSelected() { selected = exists(get("selected")) ? get("selected") : null; }
  const exists = (at) => at && rows[at.row] !== undefined && at.cell >= 0 && at.cell < rows[at.row].length;
  const textOf = (row, cell) => {
    if (!texts[row]) return "";
    if (typeof texts[row] === "string") texts[row] = texts[row].split("\u001f");
    return texts[row][cell] ?? "";
  };
  function resolve() {  // `currentColor` depends on the theme
    looks = colors.map((color) => {
      const [name, pattern] = color.split(" ");
      pixel.clearRect(0, 0, 1, 1);
      pixel.fillStyle = name === "currentColor" ? themed : name;
      pixel.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = pixel.getImageData(0, 0, 1, 1).data;
      return { css: pixel.fillStyle, value: ((a << 24) | (b << 16) | (g << 8) | r) >>> 0,
        drawn: PATTERNS[pattern], pattern, dark: 0.299 * r + 0.587 * g + 0.114 * b < 140 };
    });
  }
  function showLegend() {
    const present = new Uint8Array(256), labels = get("_labels");
    for (const row of rows) for (let cell = 0; cell < row.length; cell++) present[row[cell]] = 1;
    legend.replaceChildren();
    looks.forEach((look, code) => {
      if (!present[code] || !labels[code] || colors[code] === "transparent") return;
      const item = element(legend, "li"), swatch = element(item, "i");
      swatch.style.background = look.pattern ? swatchOf(look) : look.css;
      element(item, "span", { textContent: labels[code] });
    });
  }
  function swatchOf(look) {
    const tile = Object.assign(document.createElement("canvas"), { width: 22, height: 12 });
    const drawing = tile.getContext("2d");
    drawing.fillStyle = look.css;
    for (let y = 0; y < 12; y++) for (let x = 0; x < 22; x++) if (look.drawn(x, y, 6, 1)) drawing.fillRect(x, y, 1, 1);
    return `url(${tile.toDataURL()})`;
  }

  // --- drawing ---------------------------------------------------------------------------------
  let pending = 0;
  const redraw = () => { pending ||= requestAnimationFrame(() => { pending = 0; draw(); }); };
  const fontOf = () => `12px ${getComputedStyle(root).fontFamily}`;
  function measure() {
    const width = canvas.clientWidth, names = get("_names");
    context.font = fontOf();
    const widest = Math.max(0, ...names.map((name) => context.measureText(name).width));
    const gutter = Math.ceil(Math.min(widest + 8, Math.max(150, 0.3 * width)));
    const room = get("_height") || clamp(18 * rows.length, 18, TALLEST_PX);
    const rowPx = clamp(room / Math.max(1, rows.length), ...ROW_PX);
    const height = Math.max(18, Math.min(room, rowPx * rows.length));
    const plot = Math.max(20, width - gutter - BAR_PX - 2);
    return { width, gutter, rowPx, height, plot, names, scale: window.devicePixelRatio || 1 };
  }
  function settle() {  // keep view and scrolling within what there is
    const least = Math.min(longest, Math.max(2, (shape.plot ?? 600) / 80));
    const span = clamp(last - first, least, longest);
    first = clamp(first, 0, longest - span);
    last = first + span;
    if (shape.rowPx) top = clamp(top, 0, Math.max(0, shape.rowPx * rows.length - shape.height));
  }
  function codesOf(row, width, codes) {  // the code of each device pixel; -1 where no cell is
    const perPixel = (last - first) / width, highest = get("_merge") === "highest";
    for (let x = 0; x < width; x++) {
      if (perPixel <= 1) {
        const cell = Math.floor(first + (x + 0.5) * perPixel);
        codes[x] = cell < row.length ? row[cell] : -1;
        continue;
      }
      const from = Math.floor(first + x * perPixel);
      const to = Math.min(row.length, Math.floor(first + (x + 1) * perPixel));
      let best = -1, most = 0;
      for (let cell = from; cell < to; cell++) {
        const code = row[cell], times = highest ? code + 1 : ++counts[code];
        if (times > most || (times === most && code < best)) { best = code; most = times; }
      }
      if (!highest) for (let cell = from; cell < to; cell++) counts[row[cell]] = 0;
      codes[x] = best;
    }
  }
  const counts = new Uint32Array(256);
  let image = null;
  function paintRows() {
    const { scale, plot, rowPx, height, gutter } = shape;
    const width = Math.round(plot * scale), tall = Math.round(height * scale);
    if (image?.width !== width || image.height !== tall) image = context.createImageData(width, tall);
    const pixels = new Uint32Array(image.data.buffer).fill(0), codes = new Int16Array(width);
    const gap = rowPx >= 4 ? Math.round(GAP_PX * scale) : 0, apart = Math.round(6 * scale);
    const tiles = looks.map((look) => look.drawn && tileOf(look.drawn, apart, Math.max(1, Math.round(scale))));
    for (let row = Math.floor(top / rowPx); row < rows.length && row * rowPx < top + height; row++) {
      const from = Math.max(0, Math.round((row * rowPx - top) * scale));
      const to = Math.min(tall, Math.round(((row + 1) * rowPx - top) * scale) - gap);
      if (to <= from) continue;
      codesOf(rows[row], width, codes);
      const start = from * width, patterned = [];
      for (let x = 0; x < width; x++) {
        if (codes[x] < 0) continue;
        if (tiles[codes[x]]) patterned.push(x);
        else pixels[start + x] = looks[codes[x]].value;
      }
      for (let y = from + 1; y < to; y++) pixels.copyWithin(y * width, start, start + width);
      for (const x of patterned) {
        const tile = tiles[codes[x]], value = looks[codes[x]].value, column = x % apart;
        for (let y = from; y < to; y++) if (tile[y % apart * apart + column]) pixels[y * width + x] = value;
      }
    }
    context.putImageData(image, Math.round(gutter * scale), 0);
  }
  function paintLater() {  // pale, on any background
    const { gutter, plot, height } = shape, x = clamp(xOf(cellOf(clock)), gutter, gutter + plot);
    context.save();
    context.globalCompositeOperation = "destination-out";
    context.globalAlpha = 1 - LATER_ALPHA;
    context.fillRect(x, 0, gutter + plot - x, height);
    context.restore();
  }
  function paintClock(color) {
    const { gutter, plot, height } = shape, x = xOf(cellOf(clock));
    context.fillStyle = color;
    if (x >= gutter && x <= gutter + plot) context.fillRect(Math.round(x) - 1, 0, 2, height + 4);
  }
  function tileOf(drawn, apart, thick) {
    return Uint8Array.from({ length: apart * apart }, (_, at) => drawn(at % apart, Math.floor(at / apart), apart, thick));
  }
  const xOf = (cell) => shape.gutter + (cell - first) / (last - first) * shape.plot;
  function paintTexts(color) {
    const cellPx = shape.plot / (last - first);
    if (cellPx < 14 || shape.rowPx < 11 || !texts.some(Boolean)) return;
    context.textAlign = "left";
    for (let row = Math.floor(top / shape.rowPx); row < rows.length && row * shape.rowPx < top + shape.height; row++) {
      for (let cell = Math.floor(first); cell < Math.min(rows[row].length, last); cell++) {
        const look = looks[rows[row][cell]], x = Math.max(xOf(cell), shape.gutter);
        context.save();
        context.beginPath();
        context.rect(x, row * shape.rowPx - top, xOf(cell + 1) - x - 1, shape.rowPx);
        context.clip();
        context.fillStyle = look.drawn || colors[rows[row][cell]] === "transparent" ? color : look.dark ? "#fff" : "#000";
        context.fillText(textOf(row, cell), xOf(cell) + 2, (row + 0.5) * shape.rowPx - top);
        context.restore();
      }
    }
  }
  function paintAxis(color) {
    const { plot, gutter, height } = shape, start = get("_start"), size = get("_cell");
    const low = start + first * size, high = start + last * size, rough = (high - low) / Math.max(2, plot / 90);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = Math.max([1, 2, 5, 10].find((one) => one * power >= rough) * power, size === 1 ? 1 : 0);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    context.fillStyle = context.strokeStyle = color;
    context.globalAlpha = 0.8;
    context.textAlign = "center";
    const unit = get("_unit"), unitPx = context.measureText(unit).width;
    for (let tick = Math.ceil(low / step - 1e-9); tick * step <= high + 1e-9; tick++) {
      const x = xOf((tick * step - start) / size), text = number(tick * step || 0, digits);
      context.fillRect(Math.round(x), height, 1, 4);
      if (x + context.measureText(text).width / 2 < gutter + plot - unitPx - 6) context.fillText(text, x, height + 13);
    }
    context.textAlign = "right";
    context.fillText(unit, gutter + plot, height + 13);
    context.globalAlpha = 1;
  }
  const number = (value, digits) => value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  function paintNames(color) {
    const { rowPx, gutter, height, names } = shape, every = Math.max(1, Math.ceil(11 / rowPx));
    context.fillStyle = color;
    context.textAlign = "right";
    context.save();
    context.beginPath();
    context.rect(0, 0, gutter, height);
    context.clip();
    names.forEach((name, row) => {
      const y = (row + 0.5) * rowPx - top;
      if (row % every === 0 && y > 0 && y < height) context.fillText(name, gutter - 6, clamp(y, 6, Math.max(6, height - 6)));
    });
    context.restore();
  }
  function paintBox(at, color, thick) {
    const { gutter, plot, rowPx, height } = shape, y = at.row * rowPx - top;
    const x = Math.max(gutter, xOf(at.cell)), right = Math.min(gutter + plot, xOf(at.cell + 1));
    if (right <= gutter || x >= gutter + plot || y + rowPx <= 0 || y >= height) return;
    context.lineWidth = thick;
    context.strokeStyle = color;
    context.strokeRect(x - thick / 2, y - thick / 2, Math.max(2, right - x) + thick, rowPx - GAP_PX + thick);
  }
  function paintBar(color) {  // which rows are in sight
    const { width, rowPx, height } = shape, all = rowPx * rows.length;
    if (all <= height + 1) return;
    context.fillStyle = color;
    context.globalAlpha = 0.4;
    context.fillRect(width - BAR_PX, top / all * height, BAR_PX, Math.max(8, height / all * height));
    context.globalAlpha = 1;
  }
  function draw() {
    shape = measure();
    if (!shape.width) return;
    settle();
    const { width, height, scale } = shape, tall = height + AXIS_PX;
    const [across, down] = [Math.round(width * scale), Math.round(tall * scale)];
    if (canvas.width !== across || canvas.height !== down) {
      canvas.style.height = `${tall}px`;
      [canvas.width, canvas.height] = [across, down];
    }
    context.resetTransform();
    context.clearRect(0, 0, across, down);
    const color = getComputedStyle(root).color;
    if (color !== themed) { themed = color; resolve(); showLegend(); }
    if (rows.length) paintRows();
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.font = fontOf();
    context.textBaseline = "middle";
    if (!rows.length) { context.fillStyle = color; context.fillText("nothing to show yet", 8, 9); return; }
    if (clock !== null) paintLater();
    paintTexts(color);
    if (clock !== null) paintClock(color);
    if (cursor) paintBox(cursor, color, 1.5);
    if (selected) paintBox(selected, color, 3);
    paintAxis(color);
    paintNames(color);
    paintBar(color);
    const per = (last - first) / (shape.plot * scale);
    note.textContent = per <= 1 ? "" : `Each pixel has ${number(per, per < 10 ? 1 : 0)} cells: the ` +
      (get("_merge") === "highest" ? `last color in the legend that is among them is shown.` : "most frequent color is shown.");
  }

  // --- what is under the pointer ---------------------------------------------------------------
  const decimals = (size) => [0, 1, 2, 3, 4, 5].find((digits) => Math.abs(size * 10 ** digits - Math.round(size * 10 ** digits)) < 1e-6) ?? 6;
  const place = (cell) => {
    const size = get("_cell"), byPixel = Math.ceil(-Math.log10((last - first) * size / (shape.plot ?? 600)));
    const digits = Math.min(decimals(size), clamp(byPixel, 0, 6));
    return number(get("_start") + cell * size, digits);
  };
  function describe({ row, cell }) {
    const line = rows[row], code = line[cell], unit = get("_unit"), text = textOf(row, cell);
    let from = cell, to = cell + 1;
    while (from > 0 && line[from - 1] === code) from--;
    while (to < line.length && line[to] === code) to++;
    const at = unit.length > 2 ? `${unit} ${place(cell)}` : `${place(cell)} ${unit}`;
    const about = get("_labels")[code] || "nothing";
    const stretch = unit.length > 2 ? `${unit}s ${place(from)} to ${place(to - 1)}` : `${place(from)} to ${place(to)} ${unit}`;
    return `${get("_names")[row]}, ${at}: ${about}` + (text === "" ? "" : `, ${JSON.stringify(text)}`) +
      (to - from > 1 ? ` (${stretch})` : "");
  }
  function say() {
    const at = playing ? null : cursor ?? (clock === null ? selected : null);
    says.setAttribute("aria-live", playing ? "off" : "polite");  // a frame is no news
    if (at) says.textContent = (cursor ? "" : "Selected: ") + describe(at);
    else if (clock !== null) says.textContent = describeClock();
    else says.textContent = HELP + (timed() ? " Play, pause: P." : "");
  }

  // --- playing time ----------------------------------------------------------------------------
  const timed = () => get("_unit") === "s";
  const timeOf = (cell) => get("_start") + cell * get("_cell");
  const cellOf = (time) => (time - get("_start")) / get("_cell");
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  function describeClock() {  // how many rows do what at this moment
    const counts = new Map(), at = Math.max(0, Math.ceil(cellOf(clock) - 1e-6) - 1);
    for (const row of rows) {
      const label = at < row.length ? get("_labels")[row[at]] : "";
      if (label) counts.set(label, (counts.get(label) ?? 0) + 1);
    }
    const parts = Array.from(counts, ([label, rows]) => `${label} (${rows})`);
    return `${place(cellOf(clock))} s: ${parts.join(", ") || "nothing"}`;
  }
  function showPlayer() {
    const verb = playing ? "pause" : "play";
    player.hidden = !timed() || !rows.length;
    player.textContent = verb;
    player.title = `${verb} the visible time (P)`;
  }
  function play() {  // the visible time, from its start unless paused within it
    if (!timed() || !rows.length) return;
    if (clock === null || clock < timeOf(first) || clock >= timeOf(last)) clock = timeOf(first);
    playing = true;
    since = performance.now();
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(advance);
    shown();
  }
  function advance(now) {
    if (!playing) return;
    const calm = still.matches, passed = Math.max(0, now - since);
    if (!calm || passed >= CALM_MS) {  // without motion: a picture a second
      const ms = Math.min(passed, calm ? CALM_MS : LONGEST_FRAME_MS);
      const end = timeOf(last);
      clock = Math.min(end, clock + ms / PLAY_MS * (end - timeOf(first)));
      since = now;
      if (clock >= end) playing = false;
      shown();
    }
    if (playing) frame = requestAnimationFrame(advance);
  }
  function pause() { playing = false; shown(); }
  function rewind() { clock = null; playing = false; }
  function shown() { showPlayer(); say(); redraw(); }

  // --- acting ----------------------------------------------------------------------------------
  const timers = {};
  function report(name, value, after) {
    clearTimeout(timers[name]);
    const send = () => {
      if (JSON.stringify(get(name)) === JSON.stringify(value())) return;
      model.set(name, value());
      model.save_changes();
    };
    if (after) timers[name] = setTimeout(send, after); else send();
  }
  function moved() {
    settle();
    redraw();
    report("view", () => [first, last], VIEW_MS);
  }
  function zoom(factor, at = cursor && !byPointer ? cursor.cell + 0.5 : (first + last) / 2) {
    const center = clamp(at, first, last), span = clamp((last - first) * factor, Math.min(longest, Math.max(2, shape.plot / 80)), longest);
    const share = (center - first) / (last - first);
    first = center - share * span;
    last = first + span;
    moved();
  }
  function pan(cells) { const span = last - first; first = clamp(first + cells, 0, longest - span); last = first + span; moved(); }
  function whole() { [first, last] = [0, longest]; moved(); }
  function point(at, pointer) {
    byPointer = pointer;
    cursor = at && exists(at) ? at : null;
    if (cursor && !pointer) {  // keep it in sight
      if (cursor.cell < first) pan(cursor.cell - first);
      if (cursor.cell + 1 > last) pan(cursor.cell + 1 - last);
      const y = cursor.row * shape.rowPx;
      if (y < top) top = y;
      if (y + shape.rowPx > top + shape.height) top = y + shape.rowPx - shape.height;
    }
    say();
    redraw();
    report("hovered", () => cursor, HOVER_MS);
  }
  function select(at) {
    selected = at;
    say();
    redraw();
    report("selected", () => selected, 0);
  }
  function under(event) {
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left - shape.gutter, y = event.clientY - box.top;
    if (x < 0 || x >= shape.plot || y < 0 || y >= shape.height) return null;
    return { row: Math.floor((y + top) / shape.rowPx), cell: Math.floor(first + x / shape.plot * (last - first)) };
  }

  let drag = null, wheelElsewhere = -Infinity;
  canvas.onpointerdown = (event) => {
    if (event.button) return;
    drag = { x: event.clientX, y: event.clientY, first, top, moved: false };
    try { canvas.setPointerCapture(event.pointerId); } catch { /* a pointer that is gone */ }
  };
  canvas.onpointermove = (event) => {
    if (!drag) return point(under(event), true);
    const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
    drag.moved ||= Math.hypot(dx, dy) > 3;
    if (!drag.moved) return undefined;
    top = drag.top - dy;
    return pan(drag.first - dx / shape.plot * (last - first) - first);
  };
  canvas.onpointerup = (event) => {
    const clicked = drag && !drag.moved;
    drag = null;
    if (!clicked) return;
    const at = under(event);
    select(exists(at) ? at : null);
  };
  canvas.onpointercancel = () => { drag = null; };
  canvas.onpointerleave = () => { if (!drag && byPointer) point(null, true); };
  canvas.ondblclick = whole;
  const elsewhere = (event) => { if (event.composedPath()[0] !== canvas) wheelElsewhere = event.timeStamp; };
  window.addEventListener("wheel", elsewhere, { capture: true, passive: true });
  canvas.addEventListener("wheel", (event) => {
    const pixels = event.deltaMode ? 16 : 1, dx = event.deltaX * pixels, dy = event.deltaY * pixels;
    // Someone who scrolls the page and comes across the canvas goes on scrolling.
    const passing = event.timeStamp - wheelElsewhere < WHEEL_MS;
    if (passing && !event.ctrlKey) { wheelElsewhere = event.timeStamp; return; }
    if (dy > 0 && last - first >= longest && !event.shiftKey) return;
    event.preventDefault();
    if (event.shiftKey) { top += dy || dx; moved(); return; }
    if (Math.abs(dx) > Math.abs(dy)) { pan(dx / shape.plot * (last - first)); return; }
    const box = canvas.getBoundingClientRect();
    const share = (event.clientX - box.left - shape.gutter) / shape.plot;
    zoom(Math.exp(clamp(dy, -240, 240) * 0.003), first + clamp(share, 0, 1) * (last - first));
    point(under(event), true);
  }, { passive: false });

  const step = () => Math.max(1, Math.round((last - first) / shape.plot));
  const next = (at, by) => {  // the next cell of another code
    const line = rows[at.row];
    let cell = at.cell;
    while (line[cell + by] === line[at.cell]) cell += by;
    return cell + by;
  };
  canvas.onkeydown = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !rows.length) return;
    const from = cursor ?? selected ?? { row: Math.floor(top / shape.rowPx), cell: Math.floor(first) };
    const go = (row, cell) => {
      const line = clamp(row, 0, rows.length - 1);
      point({ row: line, cell: clamp(cell, 0, Math.max(0, rows[line].length - 1)) }, false);
    };
    const along = (by) => go(from.row, !cursor && !selected ? from.cell : event.shiftKey ? next(from, by) : from.cell + by * step());
    const keys = {
      ArrowLeft: () => along(-1), ArrowRight: () => along(1),
      ArrowUp: () => go(from.row - 1, from.cell), ArrowDown: () => go(from.row + 1, from.cell),
      Home: () => go(from.row, 0), End: () => go(from.row, rows[from.row].length - 1),
      PageUp: () => pan(first - last), PageDown: () => pan(last - first),
      w: () => zoom(0.7), "+": () => zoom(0.7), "=": () => zoom(0.7), s: () => zoom(1 / 0.7), "-": () => zoom(1 / 0.7),
      a: () => pan(-0.2 * (last - first)), d: () => pan(0.2 * (last - first)), 0: whole,
      Enter: () => { if (cursor) select(cursor); }, " ": () => { if (cursor) select(cursor); },
      p: () => playing ? pause() : play(),
      Escape: () => { rewind(); showPlayer(); select(null); point(null, false); },
    };
    const act = keys[event.key] ?? keys[event.key.toLowerCase()];
    if (!act) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  };

  // --- what changes from outside ---------------------------------------------------------------
  const changed = { view: () => { readView(); redraw(); }, selected: () => { readSelected(); say(); redraw(); } };
  for (const name of ["_cells", "_ends", "_colors", "_labels", "_names", "_texts", "_title", "_unit",
    "_start", "_cell", "_alt", "_height", "_merge"]) changed[name] = () => { stale = true; later(); };
  let stale = false;
  const later = () => queueMicrotask(() => { if (stale) { stale = false; read(); redraw(); } });  // once a message
  for (const [name, act] of Object.entries(changed)) model.on(`change:${name}`, act);
  const size = new ResizeObserver(redraw);
  size.observe(root);
  root.ontransitionend = redraw;  // the page's text color changed, by whatever theme it has
  read();
  redraw();
  return () => {
    for (const [name, act] of Object.entries(changed)) model.off(`change:${name}`, act);
    size.disconnect();
    window.removeEventListener("wheel", elsewhere, { capture: true });
    Object.values(timers).forEach(clearTimeout);
    cancelAnimationFrame(pending);
    cancelAnimationFrame(frame);
  };
}

export default { render };
