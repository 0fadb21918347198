// The pane of the graph: drawing, pan and zoom, what is marked; one tab stop, arrow keys walk the boxes. `tools.js` has the bar over it,
// `minimap.js` the map in its corner, `reading.js` what can be read at a scale.

const PAN = 60; // pixels that Shift + an arrow key moves the picture by
const LEGIBLE = 1; // the scale below which a picture is cut off at first rather than shrunk
const SMALL = 0.7; // what is too wide for the pane is not shrunk below this at first
const HALF = 0.5; // of the pane, that a framed box fills at most
const MARGIN = 16; // px of the picture at the right of its last lane
const LARGEST = 16; // px on screen of the smallest text of a framed box, at most
const HINTED = 5000; // ms that the hint of the wheel stays
const SAME = 8; // px that a pane may grow or shrink by without another layout

function graph(ui) {
  const canvas = h("div", { class: "fl-canvas" });
  const hint = h("p", { class: "fl-hint", role: "status", hidden: true });
  const legend = h("ul", { class: "fl-legend" });
  const pane = h("div", { class: "fl-graph fl-pane", "data-fl": "graph", role: "group", "data-lm-suppress-shortcuts": "true",
    "aria-label": "graph. Arrow keys walk the boxes, Enter selects, Space opens or closes a group, Shift with arrows moves the picture, plus, minus and 0 zoom, f frames the selection, comma and full stop step through equal parts, Escape clears the selection" }, canvas, hint);
  const el = h("section", { class: "fl-middle", "aria-label": "graph" });
  const place = { x: 0, y: 0, scale: 1 };
  const places = {}; // where the reader was in the other program
  let followed = null, boxes = new Map(), side = null, current = null, anchor = null, drawn = "", fitted = null, size = { width: 1, height: 1 }, read = null, readAt = 0, drag = null;

  const svg = () => canvas.querySelector("svg");
  const shape = (id) => (id ? canvas.querySelector(`[id="${CSS.escape(id)}"]`) : null);
  const items = () => ui.store.get("scene")?.items || {};
  const map = minimap({ pane, place, shape, items, boxes: () => boxes, size: () => size, on: (id) => on(id), move: () => move() });
  const bar = tools(ui, { items, boxes: () => boxes, selected: () => marked().selected?.[0], fit: () => fit(), frame: (id) => frame(id), fold: (id) => fold(id), zoom: (by) => zoom(by, undefined, undefined, true) });
  pane.insertBefore(map.el, hint);
  el.append(bar.el, pane, legend);
  const move = (glide = false) => {
    const picture = svg();
    if (!picture) return;
    const keep = 48; // so much of the picture always stays in sight
    place.x = Math.min(pane.clientWidth - keep, Math.max(keep - size.width * place.scale, place.x));
    place.y = Math.min(pane.clientHeight - keep, Math.max(keep - size.height * place.scale, place.y));
    canvas.classList.toggle("fl-glide", glide);
    picture.style.transform = `translate(${place.x}px, ${place.y}px) scale(${place.scale})`;
    if (readAt !== place.scale) drawReadable(read, (readAt = place.scale));
    map.draw();
  };
  const zoom = (factor, x = pane.clientWidth / 2, y = pane.clientHeight / 2, glide = false) => {
    const scale = Math.min(6, Math.max(0.05, place.scale * factor));
    place.x = x - ((x - place.x) * scale) / place.scale;
    place.y = y - ((y - place.y) * scale) / place.scale;
    place.scale = scale;
    move(glide);
  };
  const fit = (whole = true, glide = true) => {
    if (!svg() || !pane.clientWidth) return;
    const margin = read ? 0 : 16; // cards have their own
    const [across, down] = [(pane.clientWidth - margin) / used(), (pane.clientHeight - margin) / size.height];
    place.scale = Math.min(read ? 1 : 1.25, whole ? Math.min(across, down) : Math.max(Math.min(across, down), Math.min(LEGIBLE, across), SMALL));
    const solid = [...boxes].filter(([id]) => !items()[id]?.group || items()[id].closed).map(([, b]) => b); // frames are wide and mostly empty
    const first = solid.reduce((a, b) => (b.y < a.y ? b : a), { x: 0, y: Infinity, w: 0 });
    place.x = (pane.clientWidth - size.width * place.scale) / 2;
    if (read) place.x = Math.max(0, place.x);
    else if (place.x < 8) place.x = Math.min(8, Math.max(place.x * 2 - 8, pane.clientWidth / 2 - (first.x + first.w / 2) * place.scale));
    place.y = Math.max(margin / 2, (pane.clientHeight - size.height * place.scale) / 2);
    move(glide);
    fitted = { whole, at: at() };
  };
  // The width that has something in it: fewer lanes than the picture was laid out for leave its right side empty.
  const used = () => {
    const lanes = read ? [...canvas.querySelectorAll(".lane-body")].map((lane) => lane.x.baseVal.value + lane.width.baseVal.value) : [];
    return lanes.length ? Math.min(size.width, Math.max(...lanes) + MARGIN) : size.width;
  };
  const at = () => `${place.x} ${place.y} ${place.scale}`;
  const measure = () => { // where the boxes are in the picture itself, in its own units
    const whole = svg()?.getBoundingClientRect();
    boxes = new Map();
    if (!whole?.width) return;
    if (!read) [read, readAt] = [readPicture(svg(), size.width), 0];
    const unit = size.width / whole.width;
    for (const id of Object.keys(items())) {
      const r = (shape(id)?.querySelector(":scope > .card-body") || shape(id))?.getBoundingClientRect();
      if (r) boxes.set(id, { x: (r.left - whole.left) * unit, y: (r.top - whole.top) * unit, w: r.width * unit, h: r.height * unit });
    }
  };
  const on = (id) => { // where a box is on screen
    const b = boxes.get(id);
    return b && { x: place.x + b.x * place.scale, y: place.y + b.y * place.scale, w: b.w * place.scale, h: b.h * place.scale };
  };
  const show = (id, glide = true, margin = 28) => { // brings a box into sight, moving as little as possible
    const b = on(id);
    if (!b) return;
    const shift = (at, length, room) => {
      if (length > room - 2 * margin) return at > margin || at + length < room - margin ? margin - at : 0;
      return at < margin ? margin - at : at + length > room - margin ? room - margin - at - length : 0;
    };
    const [dx, dy] = [shift(b.x, b.w, pane.clientWidth), shift(b.y, b.h, pane.clientHeight)];
    if (!dx && !dy) return;
    place.x += dx;
    place.y += dy;
    move(glide);
  };
  // The smallest text of a box, in the picture's units.
  const smallest = (id) => Math.min(...[...shape(id).querySelectorAll("text")].map((text) => read?.sizes.get(text) ?? sizeOf(text)));
  const frame = (id) => { // half of the pane, or less; larger where its text could not be read
    const b = boxes.get(id);
    if (!b) return fit();
    const text = smallest(id), half = Math.min((HALF * pane.clientWidth) / b.w, (HALF * pane.clientHeight) / b.h);
    place.scale = Number.isFinite(text) ? Math.max(LEAST / text, Math.min(half, LARGEST / text)) : half;
    place.x = Math.max(pane.clientWidth / 2 - (b.x + b.w / 2) * place.scale, b.w * place.scale > pane.clientWidth - 16 ? 8 - b.x * place.scale : -Infinity);
    place.y = Math.max(pane.clientHeight / 2 - (b.y + b.h / 2) * place.scale, b.h * place.scale > pane.clientHeight - 16 ? 8 - b.y * place.scale : -Infinity);
    fitted ??= {};
    move(true);
  };
  const readable = (id) => { // as it stands, and whole in the pane
    const b = boxes.get(id);
    return smallest(id) * place.scale >= LEAST && b.w * place.scale < pane.clientWidth - 16 && b.h * place.scale < pane.clientHeight - 16;
  };
  const focus = (id = current, sight = true) => {
    const box = shape(id) || shape(boxes.keys().next().value);
    if (!box) return;
    shape(current)?.setAttribute("tabindex", "-1");
    current = box.id;
    box.setAttribute("tabindex", "0");
    box.focus({ preventScroll: true });
    if (sight) show(current);
  };
  const neighbour = (key) => {
    const a = boxes.get(current), [dx, dy] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[key];
    let best = null, least = Infinity;
    // A frame stands at its label, its upper left corner, or its middle would lie among the boxes inside it.
    const spot = (id, b) => (items()[id]?.group && !items()[id].closed ? [b.x + 20, b.y + 6] : [b.x + b.w / 2, b.y + b.h / 2]);
    const [ax, ay] = spot(current, a);
    for (const [id, b] of boxes) {
      const [bx, by] = spot(id, b);
      const along = (bx - ax) * dx + (by - ay) * dy, across = Math.abs((bx - ax) * dy) + Math.abs((by - ay) * dx);
      if (along > 2 && along + 2 * across < least) [best, least] = [id, along + 2 * across];
    }
    return best;
  };
  const fold = (id) => {
    if (!items()[id]?.group) return ui.store.send({ type: "select", id });
    anchor = { id, ...on(id) };
    ui.store.send({ type: "fold", id });
  };

  const step = (by) => { // to another one of equal parts: of the box that has the focus, else of what is selected
    const id = canvas.contains(ui.root.getRootNode().activeElement) ? current : ui.store.get("trail")?.at(-1)?.id;
    if (id) ui.store.send({ type: "step", id, by });
  };

  const label = (id, item, tab) => {
    const box = shape(id);
    if (!box) return;
    box.setAttribute("tabindex", tab ? "0" : "-1");
    box.setAttribute("role", "button");
    box.setAttribute("aria-label", item.label ?? item);
    if (item.group) box.setAttribute("aria-expanded", String(!item.closed));
  };
  const draw = (scene) => {
    const had = canvas.contains(ui.root.getRootNode().activeElement);
    const turned = side !== null && side !== ui.head().shown;
    if (turned) [places[side], anchor] = [{ ...place }, { id: null }];
    side = ui.head().shown ?? null;
    if (!anchor && marked().selected?.[0]) anchor = { id: marked().selected[0], ...on(marked().selected[0]) };
    if (drawn !== scene.svg) {
      canvas.innerHTML = drawn = scene.svg || ""; // made and escaped by Python
      const picture = svg();
      size = picture ? picture.viewBox.baseVal : size;
      if (picture) Object.assign(picture.style, { width: `${size.width}px`, height: `${size.height}px` });
      picture?.setAttribute("aria-hidden", "false");
      read = null;
    }
    const all = scene.items || {};
    if (!(current in all)) current = anchor && anchor.id in all ? anchor.id : Object.keys(all)[0];
    for (const [id, item] of Object.entries(all)) label(id, item, id === current);
    for (const title of canvas.querySelectorAll("svg > title, svg > g > title")) title.remove(); // "layout" as a tooltip everywhere
    measure();
    const opened = Object.values(all).some((i) => i.group && !i.closed); // it pushes others: the picture is no longer of the pane's size
    if (!fitted || (turned && !places[side]) || (read && !opened && fitted.at === at())) fit(!!read, false); // cards stay readable at any scale
    else if (turned) [Object.assign(place, places[side]), move()];
    else stay();
    if (had) focus(current, !read); // an opened card stays where it stands
    anchor = null;
    map.build();
    marks();
    bar.draw();
  };
  const stay = () => { // the box that was opened or closed stays where it was on screen
    if (read) return move(); // cards grow from their upper left corner
    const now = anchor?.x !== undefined && on(anchor.id);
    if (now) {
      place.x += anchor.x + Math.min(anchor.w, pane.clientWidth) / 2 - now.x - Math.min(now.w, pane.clientWidth) / 2;
      place.y += Math.max(anchor.y, 0) - now.y;
      move();
      if (now.h < pane.clientHeight) show(anchor.id, false, 0);
    } else move();
  };

  const marked = () => ui.store.get("marks") || {};
  const marks = () => {
    for (const kind of ["linked", "found", "near", "selected"]) {
      for (const e of canvas.querySelectorAll(`.fl-${kind}`)) e.classList.remove(`fl-${kind}`);
      for (const id of marked()[kind] || []) shape(id)?.classList.add(`fl-${kind}`);
    }
    for (const e of canvas.querySelectorAll("[aria-current]")) e.removeAttribute("aria-current");
    for (const id of marked().selected || []) shape(id)?.setAttribute("aria-current", "true");
    const said = { near: "nearest miss", found: "search hit", linked: "same kernel or line" };
    const li = (css, text) => h("li", {}, h("span", { class: `fl-swatch ${css}` }), text);
    fill(legend, Object.entries(said).filter(([k]) => marked()[k]?.length).map(([k, text]) => li(`fl-${k}`, text)));
  };
  const reveal = () => {
    marks();
    bar.draw();
    const id = marked().selected?.[0];
    if (!boxes.has(id)) return;
    if (!canvas.contains(ui.root.getRootNode().activeElement)) {
      shape(current)?.setAttribute("tabindex", "-1");
      current = id;
      shape(id).setAttribute("tabindex", "0");
    }
    const { name = "", turn = 0 } = ui.store.get("inspector") || {}, chosen = `${name} ${turn}`;
    const same = chosen === followed; // another card was opened: what was selected before stays where it is
    followed = chosen;
    if (same && !ui.reveal) return;
    show(id);
    const near = marked().near?.find((n) => boxes.has(n)); // what one came to see of a declined site
    if (near) show(near);
    if (ui.reveal) bring(id, ui.reveal !== "look");
    ui.reveal = false;
  };
  const bring = (id, take) => {
    if (!readable(id)) frame(id);
    if (take) focus(id);
  };

  const target = (event) => {
    const box = event.target.closest?.('[role="button"]');
    return box && canvas.contains(box) ? box.id : null;
  };
  ui.on(pane, "pointerdown", (e) => {
    if (e.button) return;
    drag = { x: e.clientX - place.x, y: e.clientY - place.y, moved: false, map: map.el.contains(e.target), id: target(e) };
    if (drag.map) map.hold(e);
    e.preventDefault(); // no text selection
    if (drag.id) focusQuietly(drag.id);
  });
  const focusQuietly = (id) => {
    shape(current)?.setAttribute("tabindex", "-1");
    current = id;
    shape(id).setAttribute("tabindex", "0");
    shape(id).focus({ preventScroll: true });
  };
  ui.on(pane, "focusin", (e) => { // a screen reader moves the focus by itself
    const id = target(e);
    if (!id || id === current) return;
    shape(current)?.setAttribute("tabindex", "-1");
    current = id;
    shape(id).setAttribute("tabindex", "0");
    show(id);
  });
  ui.on(pane, "pointermove", (e) => {
    if (!drag) return;
    if (drag.map) return map.hold(e);
    const [x, y] = [e.clientX - drag.x, e.clientY - drag.y];
    if (!drag.moved && Math.hypot(x - place.x, y - place.y) < 4) return;
    if (!drag.moved) pane.setPointerCapture(e.pointerId);
    drag.moved = true;
    [place.x, place.y] = [x, y];
    move();
  });
  ui.on(pane, "pointerup", (e) => {
    const clicked = drag && !drag.moved && !drag.map && drag.id === target(e) ? drag.id : null;
    drag = null;
    map.release();
    const step = clicked && e.target.closest("[data-step]"); // to another one of equal parts
    if (step) ui.store.send({ type: "step", id: clicked, by: Number(step.dataset.step) });
    else if (clicked) ui.store.send({ type: "select", id: clicked });
  });
  ui.on(pane, "pointercancel", () => { drag = null; map.release(); });
  ui.on(pane, "dblclick", (e) => { if (e.target.closest("[data-step]")) return; const id = target(e); if (items()[id]?.group) fold(id); });
  ui.on(pane, "wheel", (e) => { // the wheel alone scrolls the page, whatever is under it
    if (!e.ctrlKey && !e.metaKey && !e.shiftKey) return hinted();
    const box = pane.getBoundingClientRect();
    e.preventDefault();
    zoom(Math.exp(-(e.deltaY || e.deltaX) / 200), e.clientX - box.left, e.clientY - box.top); // Shift turns a wheel sideways
  }, { passive: false });
  const hinted = () => {
    const larger = used() * place.scale > pane.clientWidth || size.height * place.scale > pane.clientHeight;
    if (document.flHinted || !larger) return;
    document.flHinted = true; // once in a document
    hint.textContent = `${/Mac/.test(navigator.platform) ? "⌘" : "Ctrl"} + scroll zooms, drag moves`;
    hint.hidden = false;
    setTimeout(() => { hint.hidden = true; }, HINTED);
  };
  ui.on(pane, "keydown", (e) => {
    const id = target(e), shift = (x, y) => () => { place.x += x; place.y += y; move(); };
    const pans = { ArrowLeft: shift(PAN, 0), ArrowRight: shift(-PAN, 0), ArrowUp: shift(0, PAN), ArrowDown: shift(0, -PAN) };
    const all = [...boxes.keys()];
    const act = e.key in pans ? (e.shiftKey || !id ? pans[e.key] : () => { const next = neighbour(e.key); if (next) focus(next); })
      : { "+": () => zoom(1.25), "=": () => zoom(1.25), "-": () => zoom(0.8), Home: () => focus(all[0]), End: () => focus(all.at(-1)),
        Escape: () => ui.deselect() || ui.leave(), Enter: () => id && (e.shiftKey ? fold(id) : ui.store.send({ type: "select", id })), " ": () => id && fold(id) }[e.key];
    if (!act || e.ctrlKey || e.metaKey || e.altKey) return;
    e.preventDefault();
    act();
  });
  ui.on(pane, "scroll", () => { // the browser brought something into sight by itself: that is a pan
    place.x -= pane.scrollLeft;
    place.y -= pane.scrollTop;
    pane.scrollTo(0, 0);
    move();
  });
  const told = { width: 0, height: 0, timer: 0 };
  const tellSize = () => { // the picture is laid out anew for the pane it has
    const [width, height] = [pane.clientWidth, pane.clientHeight];
    if (ui.abort.signal.aborted || !width || (Math.abs(width - told.width) < SAME && Math.abs(height - told.height) < SAME)) return;
    Object.assign(told, { width, height });
    ui.store.send({ type: "pane", width, height });
  };
  const resized = new ResizeObserver(() => {
    if (!pane.clientWidth) return;
    if (!boxes.size) measure();
    map.build();
    clearTimeout(told.timer); // a panel that is dragged changes the size at every step
    told.timer = setTimeout(tellSize, told.width ? WAIT : 0);
    if (!fitted) fit(!!read, false);
    else if (fitted.at === at()) fit(fitted.whole, false); // nobody has moved it since
    else move();
  });
  resized.observe(pane);
  ui.abort.signal.addEventListener("abort", () => (clearTimeout(told.timer), resized.disconnect()));

  return { el, pane, focus: () => focus(), step, fit: () => fit(), tools: bar.draw, frame: () => frame(marked().selected?.[0]), draw: { scene: (s) => draw(s || {}), marks: reveal, trail: bar.path, inspector: () => { if (ui.reveal) reveal(); }, head: () => (bar.draw(), bar.path()),
    busy: ({ running }) => { pane.classList.toggle("fl-dimmed", !!running); pane.setAttribute("aria-busy", String(!!running)); } } };
}
